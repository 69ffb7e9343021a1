"""Tokenizers from GGUF metadata.

Built here and not by transformers, which ignores ``tokenizer.ggml.pre`` and so cuts digits and spaces of many models in
another way than they were trained on.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer

from qiao.errors import ModelError
from qiao.loading import vocabularies
from qiao.loading.gguf_file import GGUFModel
from qiao.loading.text_tokenizer import TextTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_PREFIX = "tokenizer.ggml."


def gguf_tokenizer(model: GGUFModel) -> TextTokenizer:
    """The tokenizer and chat template of a GGUF file. Raises ``ModelError`` for kinds that would be cut wrongly."""
    tokens = model.get(_PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{model.path}: carries no tokenizer. Give one with --tokenizer.")
    kind = model.get(_PREFIX + "model")
    if kind == "gpt2":
        tokenizer = _byte_level(model, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(model, tokens)
    else:
        raise ModelError(
            f"{model.path}: its tokenizer kind {kind!r} is not read. Give the model's folder with --tokenizer."
        )
    return vocabularies.wrap(tokenizer, _prefix(model, tokens), **_settings(model, tokens))


def _byte_level(model: GGUFModel, tokens: list[str]) -> Tokenizer:
    rule = model.get(_PREFIX + "pre", "default")
    if rule not in vocabularies.SPLITS:
        raise ModelError(
            f"{model.path}: its pre-tokenizer {rule!r} is not known, and a guess would cut text wrongly. "
            "Give the model's folder with --tokenizer."
        )
    merges = [_pair(model, text) for text in model.get(_PREFIX + "merges") or []]
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    return vocabularies.byte_level_bpe(vocab, merges, rule, _added(model, tokens))


def _sentencepiece(model: GGUFModel, tokens: list[str]) -> Tokenizer:
    scores = model.get(_PREFIX + "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{model.path}: its tokenizer has no scores. Give the model's folder with --tokenizer.")
    prefix_space = bool(model.get(_PREFIX + "add_space_prefix", True))
    unknown = _token(model, tokens, "unknown") or next(iter(_of_kind(model, tokens, _UNKNOWN)), None)
    return vocabularies.sentencepiece_bpe(tokens, scores, _added(model, tokens), prefix_space, unknown)


def _added(model: GGUFModel, tokens: list[str]) -> list[AddedToken]:
    kinds = model.get(_PREFIX + "token_type") or []
    added = [
        vocabularies.special(text, kind != _USER_DEFINED)
        for text, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and text
    ]
    return added + [vocabularies.special(text) for text in _of_kind(model, tokens, _UNKNOWN)]


def _of_kind(model: GGUFModel, tokens: list[str], wanted: int) -> list[str]:
    kinds = model.get(_PREFIX + "token_type") or []
    return [text for text, kind in zip(tokens, kinds, strict=False) if kind == wanted]


def _prefix(model: GGUFModel, tokens: list[str]) -> list[str]:
    """BOS, where texts begin with it."""
    by_kind = model.get(_PREFIX + "model") == "llama" or model.get(_PREFIX + "pre") in vocabularies.LLAMA3_SPLITS
    bos = _token(model, tokens, "bos")
    return [bos] if bos is not None and model.get(_PREFIX + "add_bos_token", by_kind) else []


def _settings(model: GGUFModel, tokens: list[str]) -> dict[str, Any]:
    return {
        "bos_token": _token(model, tokens, "bos"),
        "eos_token": _token(model, tokens, "eos"),
        "unk_token": _token(model, tokens, "unknown"),
        "pad_token": _token(model, tokens, "padding"),
        "chat_template": model.get("tokenizer.chat_template"),
    }


def _token(model: GGUFModel, tokens: list[str], name: str) -> str | None:
    i = model.get(f"{_PREFIX}{name}_token_id")
    return tokens[i] if isinstance(i, int) and 0 <= i < len(tokens) else None


def _pair(model: GGUFModel, text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not space:
        raise ModelError(f"{model.path}: damaged: the merge {text!r} is no pair. Fetch it again.")
    return left, right

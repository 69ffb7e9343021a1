"""Tokenizers built from bare vocabularies: byte-level BPE and SentencePiece BPE, run by the ``tokenizers`` library."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from qiao.loading.text_tokenizer import TextTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _MODERN.replace("{DIGITS}", "{1,3}")
_QWEN2 = _MODERN.replace("{DIGITS}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+"
    r"((?=[\p{L}])([^A-Z]))*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
"""How text is cut before byte-level BPE, by llama.cpp's name of the rule."""

LLAMA3_SPLITS = frozenset({"llama-bpe", "llama3", "llama-v3"})
NFC_SPLITS = frozenset({"qwen2", "deepseek-r1-qwen"})


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], rule: str, added: Sequence[AddedToken]
) -> Tokenizer:
    """A byte-level BPE tokenizer with the cutting rule ``rule`` (a key of ``SPLITS``)."""
    model = BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=rule in LLAMA3_SPLITS)
    tokenizer = Tokenizer(model)
    if rule in NFC_SPLITS:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[rule]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], added: Sequence[AddedToken], prefix_space: bool, unknown: str | None
) -> Tokenizer:
    """A SentencePiece BPE tokenizer with byte fallback; ``prefix_space`` puts a space before each text.

    Merges follow from the scores: a better piece is merged first (the rule of transformers' SentencePiece extractor).
    """
    vocab: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        vocab.setdefault(piece, i)
    fallback = "<0x00>" in vocab
    model = BPE(
        vocab=vocab, merges=merges_from_scores(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=fallback
    )
    tokenizer = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        spaces.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens(list(added))
    return tokenizer


def merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to make a piece from two others, best score first."""
    ranked: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right, (piece[:cut], piece[cut:])))
    return [entry[4] for entry in sorted(ranked)]


def wrap(tokenizer: Tokenizer, prefix: Sequence[str] = (), chat_template: Any = None, **tokens: Any) -> TextTokenizer:
    """With its named special ``tokens``; ``prefix`` are special tokens put before each text."""
    if prefix:
        ids = [(token, tokenizer.token_to_id(token)) for token in prefix]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A"], pair=[*prefix, "$A", "$B"], special_tokens=ids
        )
    return TextTokenizer(tokenizer, tokens, chat_template)


def special(text: str, is_special: bool = True) -> AddedToken:
    """A token that is found in the text before anything else."""
    return AddedToken(text, special=is_special, normalized=False)


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character of each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return tuple(table[byte] for byte in range(256))

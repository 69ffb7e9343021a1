"""Tokenizers of checkpoints that ship Python code, read from their data files without running it.

SentencePiece files (``tokenizer.model`` of ChatGLM2/3, InternLM2, Baichuan) and tiktoken ranks (GLM-4).
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from qiao.errors import ModelError
from qiao.loading import vocabularies
from qiao.loading.config import read_json
from qiao.loading.text_tokenizer import TextTokenizer

_CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
"""ChatGLM3's tokens after the SentencePiece vocabulary, in the order of its own tokenizer."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def plain_tokenizer(folder: Path, config: dict[str, Any]) -> TextTokenizer:
    """A tokenizer from ``tokenizer.model``. Raises ``ModelError`` when only the checkpoint's code could read it."""
    file = folder / "tokenizer.model"
    name = str(config.get("tokenizer_class", "")).lower()
    if not file.is_file():
        raise ModelError(_needs_code(folder))
    if "chatglm4" in name:
        return _tiktoken(folder, file, config)
    return _sentencepiece(folder, file, config, name)


def _sentencepiece(folder: Path, file: Path, config: dict[str, Any], name: str) -> TextTokenizer:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        raise ModelError(f"{file}: no readable SentencePiece model ({error}). {_needs_code(folder)}") from error
    count = model.get_piece_size()
    pieces = [model.id_to_piece(i) for i in range(count)]
    scores = [model.get_score(i) for i in range(count)]
    control = [pieces[i] for i in range(count) if model.is_control(i) or model.is_unknown(i)]
    extra = _extra_tokens(config, len(pieces), "chatglm" in name)
    for i in sorted(extra):
        pieces.extend(f"<unused_{j}>" for j in range(len(pieces), i))
        pieces.append(extra[i].content)
    scores.extend([float("-inf")] * (len(pieces) - count))
    added = [vocabularies.special(text) for text in control] + [extra[i] for i in sorted(extra)]
    prefix_space = model.encode("a", out_type=str)[:1] != ["a"]
    tokenizer = vocabularies.sentencepiece_bpe(pieces, scores, added, prefix_space, pieces[model.unk_id()])
    _check(tokenizer, model, file)
    settings = _settings(config)
    prefix: list[str] = []
    if "chatglm" in name:
        prefix = ["[gMASK]", "sop"]
        settings = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>", **settings}
    elif config.get("add_bos_token") and settings.get("bos_token"):
        prefix = [settings["bos_token"]]
    return vocabularies.wrap(tokenizer, prefix, **settings, chat_template=_template(folder, config))


def _check(tokenizer: Tokenizer, model: Any, file: Path) -> None:
    """The rebuilt tokenizer must agree with the SentencePiece library itself on a sample."""
    for text in ("Hello, world! 12345", "你好，世界。 def f(x):\n\treturn x", "naïve café 😀"):
        expected = model.encode(text)
        if tokenizer.encode(text, add_special_tokens=False).ids != expected:
            raise ModelError(f"{file}: could not be rebuilt faithfully. {_needs_code(file.parent)}")


def _extra_tokens(config: dict[str, Any], size: int, chatglm: bool) -> dict[int, AddedToken]:
    """Tokens after the SentencePiece vocabulary, by id."""
    extra = {size + i: vocabularies.special(text) for i, text in enumerate(_CHATGLM)} if chatglm else {}
    for key, value in config.get("added_tokens_decoder", {}).items():
        if int(key) >= size:
            extra[int(key)] = vocabularies.special(value["content"], bool(value.get("special")))
    return extra


def _tiktoken(folder: Path, file: Path, config: dict[str, Any]) -> TextTokenizer:
    """GLM-4: ranks of byte strings in base64; the rank is also the id, and merges follow from the ranks."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ModelError(f"{file}: no readable tiktoken ranks ({error}). {_needs_code(folder)}") from error
    alphabet = vocabularies.byte_alphabet()
    text = {token: "".join(alphabet[b] for b in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(text[a], text[b]) for a, b in sorted(cuts, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))]
    vocab = {text[token]: rank for token, rank in ranks.items()}
    extra = _extra_tokens(config, len(vocab), chatglm=False)
    vocab.update({token.content: i for i, token in extra.items()})
    tokenizer = vocabularies.byte_level_bpe(vocab, merges, "glm4", [extra[i] for i in sorted(extra)])
    prefix = [token for token in ("[gMASK]", "<sop>") if token in vocab]
    return vocabularies.wrap(tokenizer, prefix, **_settings(config), chat_template=_template(folder, config))


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key in _TOKENS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


def _template(folder: Path, config: dict[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if (folder / "chat_template.json").is_file():
        return read_json(folder / "chat_template.json").get("chat_template")
    return config.get("chat_template")


def _needs_code(folder: Path) -> str:
    return (
        f"{folder}: its tokenizer is Python code of the checkpoint. Read that code, then start with "
        "--trust-remote-code, or give another tokenizer with --tokenizer."
    )

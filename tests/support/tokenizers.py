"""Small tokenizers written as Hugging Face folders: BYTETOK of the public cases, and a SentencePiece-like twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = {BOS: "<s>", EOS: "</s>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return table


def _added(token_id: int, text: str, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _write(path: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def byte_tokenizer(
    path: str | Path,
    *,
    chat_template: str | None = CHATML,
    extra_tokens: dict[int, str] | None = None,
    **config: Any,
) -> Path:
    """BYTETOK: ids 0-255 are the raw bytes, 256 ``<s>``, 257 ``</s>`` (EOS), 258 and 259 the ChatML marks.

    ``extra_tokens`` adds plain (not special) tokens, for example ``{300: "hello"}``. ``config`` goes into
    ``tokenizer_config.json``. Returns the folder.
    """
    extra = extra_tokens or {}
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    vocab.update({text: token_id for token_id, text in SPECIALS.items()})
    vocab.update({text: token_id for token_id, text in extra.items()})
    added = [_added(i, text, True) for i, text in SPECIALS.items()]
    added += [_added(i, text, False) for i, text in extra.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000,
        **config,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    return _write(Path(path), tokenizer, settings)


def spm_tokenizer(path: str | Path, *, words: tuple[str, ...] = (), **config: Any) -> Path:
    """A SentencePiece-like tokenizer: "▁" marks spaces, one prefix space, bytes as ``<0x..>`` fallback.

    Ids: 0 ``<unk>``, 1 ``<s>``, 2 ``</s>``, 3-258 the bytes, then "▁", the printable ASCII characters, and ``words``.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for piece in ("▁", *(chr(c) for c in range(33, 127)), *words):
        vocab.setdefault(piece, len(vocab))
    merges = [[word[:i], word[i:]] for word in words for i in range(1, len(word)) if {word[:i], word[i:]} <= set(vocab)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, text, True) for i, text in enumerate(("<unk>", "<s>", "</s>"))],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    return _write(Path(path), tokenizer, settings)

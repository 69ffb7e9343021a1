"""A tokenizer without transformers, whose import costs a front end most of a second and, through torch, 200 MB."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import AddedToken, Tokenizer

from qiao.loading.config import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    AnyTokenizer: TypeAlias = "TextTokenizer | PreTrainedTokenizerBase"

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that have a name of their own, in transformers' order."""

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that take ``tokenizer.json`` as it is. Others rebuild it by rules of their own, which are not repeated."""

_MODEL_TYPES = ("llama", "qwen3", "smollm3", "gemma2", "gemma3", "gemma3_text")
"""Types for which transformers uses the class that the file names; for some others it knows better."""

_ELSEWHERE = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates", "chat_template.json")
"""Older places of tokens and templates, whose precedence is transformers' own affair."""


class TextTokenizer:
    """A tokenizer of the ``tokenizers`` library, its named special tokens and its chat template.

    Offers what serving reads of transformers' class, under the same names. ``tokens`` has keys of ``NAMED``.
    """

    def __init__(self, backend: Tokenizer, tokens: Mapping[str, str | None], chat_template: Any = None) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = {name: token for name in NAMED if (token := tokens.get(name)) is not None}
        self.chat_template = chat_template
        missing = set(self.special_tokens_map.values()) - {t.content for t in self.added_tokens_decoder.values()}
        if missing:  # a name makes a token special, as in transformers
            wanted = [t for t in dict.fromkeys(self.special_tokens_map.values()) if t in missing]
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in wanted])

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text before all others, by id."""
        found: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end token."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones too, with their ids."""
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ``ids``; spaces are never cleaned up."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The token of each id, None for one that does not exist."""
        return [self.backend_tokenizer.id_to_token(i) for i in ids]

    def to_transformers(self) -> PreTrainedTokenizerBase:
        """The same as transformers' class."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            clean_up_tokenization_spaces=False,
            **self.special_tokens_map,
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
        )


def folder_tokenizer(folder: Path) -> TextTokenizer | None:
    """The tokenizer of a Hugging Face folder where ``tokenizer.json`` alone settles it, None where it does not.

    That is so where transformers would load that file by its general class and find nothing to change in it.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not file.is_file() or not settings.is_file() or any((folder / name).exists() for name in _ELSEWHERE):
        return None
    config = read_json(settings)
    if config.get("tokenizer_class") not in _GENERIC or "auto_map" in config or not _plain_model(folder):
        return None
    framed = [config[key] for key in ("add_bos_token", "add_eos_token") if config.get(key) is not None]
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception:  # transformers reports it, or repairs it
        return None
    named, extra = _declared(config)
    held = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = [*named.values(), *extra]
    if any(framed) or (framed and backend.num_special_tokens_to_add(is_pair=False)):
        return None  # the config says what is put around a text, or that nothing is, and the file says another thing
    if backend.truncation or backend.padding or not all(_agree(token, held) for token in declared):
        return None
    tokens = {name: token.content for name, token in named.items()}
    return TextTokenizer(backend, tokens, _template(folder, config))


def _plain_model(folder: Path) -> bool:
    file = folder / "config.json"
    if not file.is_file():
        return False
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("model_type") in _MODEL_TYPES
    except (ValueError, AttributeError):
        return False


def _declared(config: Mapping[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The special tokens of ``tokenizer_config.json``: those with a name, and the others."""
    named = {name: _token(config[name]) for name in NAMED if config.get(name) is not None}
    others: list[Any] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(key) or []
        others += value.values() if isinstance(value, Mapping) else value
    others += (config.get("added_tokens_decoder") or {}).values()
    return named, [_token(value) for value in others]


def _token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = {key: bool(value.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(value.get("content", ""), **flags)


def _agree(token: AddedToken, held: Mapping[str, AddedToken]) -> bool:
    """Whether ``tokenizer.json`` has ``token`` with the same flags."""
    found = held.get(token.content)
    flags = ("special", "single_word", "lstrip", "rstrip", "normalized")
    return found is not None and all(getattr(found, flag) == getattr(token, flag) for flag in flags)


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    return {entry["name"]: entry["template"] for entry in found} if isinstance(found, list) else found

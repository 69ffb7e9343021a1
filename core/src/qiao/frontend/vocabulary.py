"""What bytes a token stands for, so that text can be made without decoding anything twice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qiao.loading.text_tokenizer import AnyTokenizer

_SAMPLE = 64


class TokenTable:
    """The bytes of each token of a tokenizer, found on demand and kept.

    ``exact`` says whether joined bytes give the tokenizer's own text. That holds for byte-level BPE and for
    SentencePiece with byte fallback; for others use ``tokenizer.decode``. ``strip_start`` is how many spaces decoding
    drops at the start of a text. ``special_ids`` is what ``skip_special_tokens`` skips.
    """

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(
            i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
        )
        self._raw: dict[int, bytes] = {}
        self._labels: dict[int, str] = {}
        self._replace: list[tuple[str, str]] = []
        self._bytes_of_char: Mapping[str, int] | None = None
        self.strip_start = 0
        self.exact = self._read_decoder() and self._agrees()

    def raw(self, token_id: int) -> bytes:
        """The token's bytes, empty for an id without text."""
        found = self._raw.get(token_id)
        if found is None:
            found = self._raw[token_id] = self._make_raw(token_id)
        return found

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of ``special_ids``."""
        return frozenset(self.raw(i).decode("utf-8", "replace") for i in self.special_ids) - {""}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The tokenizer's own text of ``token_ids``; ids without text give none."""
        known = [i for i in token_ids if self._token(i) is not None]
        text = self.tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def label(self, token_id: int) -> str:
        """A name for log-probabilities: its text, or ``bytes:\\xe2\\x82`` for a part of a character (OpenAI's form), or
        ``token_id:300`` for an id without text.
        """
        found = self._labels.get(token_id)
        if found is None:
            found = self._labels[token_id] = self._make_label(token_id)
        return found

    def _make_label(self, token_id: int) -> str:
        raw = self.raw(token_id)
        if not raw:
            return f"token_id:{token_id}"
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _make_raw(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._bytes_of_char is not None:
            table = self._bytes_of_char
            values = [table.get(char) for char in token]
            # A token with a character outside the table is plain text; the ByteLevel decoder has the same rule.
            return token.encode("utf-8", "replace") if None in values else bytes(values)  # type: ignore[arg-type]
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    def _token(self, token_id: int) -> str | None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            found: str | None = backend.id_to_token(token_id) if token_id >= 0 else None
            return found
        if not 0 <= token_id < len(self.tokenizer):
            return None
        token = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        return token if isinstance(token, str) else None

    def _read_decoder(self) -> bool:
        decoder = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "decoder", None)
        if decoder is None:
            return False
        spec = json.loads(decoder.__getstate__())
        steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            self._bytes_of_char = _byte_of_char()
            return True
        return self._read_sentencepiece(steps)

    def _read_sentencepiece(self, steps: list[dict[str, Any]]) -> bool:
        kinds = [step["type"] for step in steps]
        if "ByteFallback" not in kinds or "Fuse" not in kinds:
            return False
        for i, step in enumerate(steps):
            if step["type"] == "Replace" and "String" in step["pattern"] and i < kinds.index("ByteFallback"):
                self._replace.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip" and step["content"] == " " and not step["stop"] and i > kinds.index("Fuse"):
                self.strip_start += step["start"]
            elif step["type"] not in ("ByteFallback", "Fuse"):
                return False
        return True

    def _agrees(self) -> bool:
        """Whether a sample of ids decodes as the tokenizer does it itself."""
        size = len(self.tokenizer)
        for i in range(0, size, max(1, size // _SAMPLE)):
            ids = [i, i]
            if i in self.special_ids:
                continue
            mine = (self.raw(i) * 2).decode("utf-8", "replace")
            mine = mine[min(self.strip_start, len(mine) - len(mine.lstrip(" "))) :]
            theirs = self.decode(ids, skip_special_tokens=False)
            if "\ufffd" not in mine and mine != theirs:
                return False
        return True


def _byte_of_char() -> dict[str, int]:
    """The byte of each printable character of byte-level BPE."""
    from qiao.loading.vocabularies import byte_alphabet

    return {char: byte for byte, char in enumerate(byte_alphabet())}

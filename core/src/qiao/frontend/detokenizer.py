"""Text from tokens as they come.

The rule: all pieces joined are ``decode(prompt + output)`` without what ``decode(prompt)`` shows of complete
characters. A character split over tokens appears once, with its last byte. Bytes that can never become a character give
U+FFFD, one for each maximal broken part (Unicode 3.9, as Python and Rust do it); an unfinished character gives one at
the end. Nothing is decoded twice. ``clean_up_tokenization_spaces`` has no effect, as in vLLM.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from qiao.frontend.vocabulary import TokenTable

_TAIL_BYTES = 4
"""A UTF-8 character has at most this many."""

_WINDOW = 6
"""Prompt tokens that give a generic decoder its context."""

_MAX_HELD = 8
"""Tokens after which a generic decoder no longer waits for a character to complete."""


class Detokenizer(Protocol):
    """One sequence's text."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end of the sequence."""
        ...


def make_detokenizer(table: TokenTable, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
    """The exact detokenizer where bytes are known, else one over ``tokenizer.decode``."""
    if table.exact:
        return ByteDetokenizer(table, prompt_ids, skip_special_tokens)
    return WindowDetokenizer(table, prompt_ids, skip_special_tokens)


class ByteDetokenizer:
    """Tokens to bytes by table, bytes to text by an incremental UTF-8 decoder."""

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._raw = table.raw
        self._skip = table.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skip:
                tail = self._raw(token_id) + tail
            if len(tail) >= _TAIL_BYTES:
                break
        self._decoder.decode(tail)
        self._strip = 0 if tail else table.strip_start

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        if token_id in self._skip:
            return ""
        text = self._decoder.decode(self._raw(token_id))
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._decoder.decode(b"", True)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class WindowDetokenizer:
    """For any tokenizer: decode the tokens since the last complete piece, with a short context before them."""

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_WINDOW:])
        self._shown = len(self._ids)
        self._context = self._decode().rstrip("\ufffd")  # an unfinished character of the prompt may yet complete

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < _MAX_HELD:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._take(self._decode()) if len(self._ids) > self._shown else ""

    def _take(self, text: str) -> str:
        new = text[len(self._context) :]
        self._ids = self._ids[-_WINDOW:]
        self._shown = len(self._ids)
        self._context = self._decode()
        return new

    def _decode(self) -> str:
        return self._table.decode(self._ids, self._skip)

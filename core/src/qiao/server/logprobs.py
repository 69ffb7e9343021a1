"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from qiao.frontend import TokenTable
from qiao.outputs import Logprob
from qiao.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from qiao.server.protocol.common import PromptLogprob, PromptLogprobs
from qiao.server.protocol.completions import CompletionLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold (OpenAI's value)."""

Candidates = Mapping[int, Logprob]


def finite(value: float) -> float:
    """``value``, not below ``LOWEST``. Not a number counts as minus infinity."""
    return value if value > LOWEST else LOWEST


def best_first(candidates: Candidates, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` likeliest (-1: all), ties by id."""
    ordered = sorted(candidates.items(), key=lambda item: (-item[1].logprob, item[0]))
    return ordered if count < 0 else ordered[:count]


class TokenText:
    """Names tokens for answers: their text, or ``token_id:N`` when the client wants ids."""

    def __init__(self, table: TokenTable, as_ids: bool) -> None:
        self._table = table
        self._as_ids = as_ids

    def raw(self, token: int) -> bytes:
        """The token's bytes; empty for an id without text."""
        return self._table.raw(token)

    def special(self, token: int) -> bool:
        """Whether decoding skips the token."""
        return token in self._table.special_ids

    def chat(self, token: int) -> str:
        """The text, with a replacement mark for half a character; ``bytes`` has the truth beside it."""
        raw = self._table.raw(token)
        return f"token_id:{token}" if self._as_ids or not raw else raw.decode("utf-8", "replace")

    def completion(self, token: int) -> str:
        r"""The text, or ``bytes:\xe2\x82`` for half a character (OpenAI's form), so that two never look the same."""
        return f"token_id:{token}" if self._as_ids else self._table.label(token)


def chat_logprobs(
    tokens: Sequence[int], candidates: Sequence[Candidates], count: int, naming: TokenText
) -> ChatLogprobs:
    """Entries for ``tokens``, each with its ``count`` best alternatives."""
    content = []
    for token, options in zip(tokens, candidates, strict=True):
        tops = [
            TopLogprob(token=naming.chat(i), logprob=finite(o.logprob), bytes=list(naming.raw(i)))
            for i, o in best_first(options, count)
        ]
        name, value = naming.chat(token), finite(options[token].logprob)
        content.append(TokenLogprob(token=name, logprob=value, bytes=list(naming.raw(token)), top_logprobs=tops))
    return ChatLogprobs(content=content, refusal=None)


class CompletionLogprobsBuilder:
    """Builds the parallel lists piece by piece; offsets go on counting from piece to piece, in characters."""

    def __init__(self, naming: TokenText, skip_special: bool) -> None:
        self._naming = naming
        self._skip_special = skip_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip(self, characters: int) -> None:
        """Text that has no entries, such as an echoed prompt without log-probabilities."""
        self._offset += characters

    def build(self, tokens: Sequence[int], candidates: Sequence[Candidates | None]) -> CompletionLogprobs:
        """Entries for ``tokens``. The alternatives always hold the token itself."""
        made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, options in zip(tokens, candidates, strict=True):
            made.text_offset.append(self._offset)
            made.tokens.append(self._naming.completion(token))
            if not (self._skip_special and self._naming.special(token)):
                self._offset += len(self._decoder.decode(self._naming.raw(token)))
            if options is None:
                made.token_logprobs.append(None)
                made.top_logprobs.append(None)
                continue
            made.token_logprobs.append(finite(options[token].logprob))
            tops = {self._naming.completion(i): finite(o.logprob) for i, o in reversed(best_first(options, -1))}
            made.top_logprobs.append(dict(reversed(tops.items())))
        return made


def prompt_logprobs(entries: Sequence[Candidates | None] | None) -> PromptLogprobs | None:
    """vLLM's shape: for each prompt token its candidates by id, None for the first."""
    if entries is None:
        return None
    return [
        None
        if one is None
        else {
            str(token): PromptLogprob(logprob=finite(o.logprob), rank=o.rank, decoded_token=o.decoded_token)
            for token, o in one.items()
        }
        for one in entries
    ]

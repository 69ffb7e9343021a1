"""One request's results: text, stop strings, log-probabilities and counts, from what the engine sends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qiao.engine.request import EngineRequest, SequenceOutput, TokenLogprobs
from qiao.frontend.detokenizer import Detokenizer, make_detokenizer
from qiao.frontend.stops import StopChecker
from qiao.frontend.vocabulary import TokenTable
from qiao.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from qiao.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from qiao.loading.text_tokenizer import AnyTokenizer


@dataclass(slots=True)
class OutputDelta:
    """What one step added to one answer.

    ``text`` may lag behind ``token_ids`` while a stop string or a character could still complete. ``offsets[i]`` is how
    many characters of the answer stood before ``token_ids[i]``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: ``completion_tokens`` over all answers of the request, ``cached_tokens`` of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class OutputProcessor:
    """Turns the engine's token ids into answers.

    ``add`` takes each ``SequenceOutput`` of the request in turn and returns the same, growing ``RequestOutput``;
    ``deltas`` holds what that call added, ``to_abort`` the answers that a stop string ended in it and the engine
    still runs; ``embedding`` is the vector of a pooling request. Stop strings
    count once ``min_tokens`` tokens are there. Tokens and log-probabilities are kept up to the
    token that completed the stop string, the text up to its start (or end, with ``include_stop_str_in_output``).
    ``Frontend.processor`` makes one without reading the tokenizer again.
    """

    def __init__(self, request: EngineRequest, prompt_text: str | None, tokenizer: TokenTable | AnyTokenizer) -> None:
        table = tokenizer if isinstance(tokenizer, TokenTable) else TokenTable(tokenizer)
        self.request = request
        self.deltas: list[OutputDelta] = []
        self.to_abort: list[int] = []
        self.embedding: bytes | None = None
        self._table = table
        self._answers = [_Answer(i, request, table) for i in range(request.params.n)]
        self._stopped_here = False
        self.result = RequestOutput(
            request_id=request.request_id,
            prompt=prompt_text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[answer.output for answer in self._answers],
            metrics=RequestMetrics(arrival_time=request.arrival),
        )

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return self.result.finished

    @property
    def stopped(self) -> bool:
        """Whether all answers have ended and at least one did so here, unknown to the engine."""
        return self.result.finished and self._stopped_here

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        completion = sum(len(answer.output.token_ids) for answer in self._answers)
        return Usage(len(self.request.prompt_token_ids), completion, self.result.num_cached_tokens or 0)

    def add(self, output: SequenceOutput) -> RequestOutput:
        """Take one step's output. What comes for an answer that has already ended is dropped."""
        self.deltas, self.to_abort = [], []
        self._note_times(output)
        if output.prompt_logprobs is not None and self.result.prompt_logprobs is None:
            self.result.prompt_logprobs = [
                None if entry is None else self._decoded(entry) for entry in output.prompt_logprobs
            ]
        answer = self._answers[output.index]
        if answer.output.finish_reason is None:
            logprobs = None if output.logprobs is None else [self._decoded(entry) for entry in output.logprobs]
            self.deltas.append(answer.add(output, logprobs))
            if answer.checker.matched is not None and output.finish_reason is None:
                self.to_abort.append(output.index)
                self._stopped_here = True
        self.embedding = output.embedding or self.embedding
        if output.error is not None:
            self.result.error = output.error
        if (
            answer.output.finish_reason is not None
            and not self.result.finished
            and all(a.output.finish_reason is not None for a in self._answers)
        ):
            self.result.finished = True
            assert self.result.metrics is not None
            self.result.metrics.finished_time = time.time()
        return self.result

    def abort(self, reason: str = "abort") -> RequestOutput:
        """End every running answer, for example when the client has gone; held-back text is shown."""
        self.deltas, self.to_abort = [], []
        for answer in self._answers:
            if answer.output.finish_reason is None:
                ended = SequenceOutput(
                    request_id=self.request.request_id, index=answer.output.index, finish_reason=reason
                )
                self.deltas.append(answer.add(ended, None))
        self.result.finished = True
        return self.result

    def snapshot(self, kind: RequestOutputKind) -> RequestOutput | None:
        """A copy to keep: all so far, what the last ``add`` brought, or with FINAL_ONLY None until the end."""
        if kind is RequestOutputKind.FINAL_ONLY and not self.result.finished:
            return None
        if kind is RequestOutputKind.DELTA:
            outputs = [self._answers[delta.index].delta_output(delta) for delta in self.deltas]
        else:
            outputs = [answer.copy() for answer in self._answers]
        return replace(self.result, outputs=outputs)

    def _note_times(self, output: SequenceOutput) -> None:
        metrics = self.result.metrics
        assert metrics is not None
        metrics.first_scheduled_time = metrics.first_scheduled_time or output.scheduled
        if output.token_ids:
            metrics.last_token_time = time.time()
            metrics.first_token_time = metrics.first_token_time or output.first_token or metrics.last_token_time
        if self.result.num_cached_tokens is None:
            self.result.num_cached_tokens = output.num_cached_tokens

    def _decoded(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the alternatives in order; ``Logprob.rank`` from 1."""
        label = self._table.label
        first = entry.token_ids[0]
        result = {first: Logprob(entry.logprobs[0], entry.rank, label(first))}
        pairs = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        for rank, (token_id, logprob) in enumerate(pairs, start=1):
            if token_id not in result:
                result[token_id] = Logprob(logprob, rank, label(token_id))
        return result


class _Answer:
    """One sequence of a request."""

    def __init__(self, index: int, request: EngineRequest, table: TokenTable) -> None:
        params = request.params
        wants_logprobs = params.logprobs is not None
        self.output = CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0 if wants_logprobs else None,
            logprobs=[] if wants_logprobs else None,
        )
        self.checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._show_stop_token = params.include_stop_str_in_output
        self._ends = frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        self._text: Detokenizer | None = None
        if params.detokenize:
            self._text = make_detokenizer(table, request.prompt_token_ids, params.skip_special_tokens)
        self._decoded_length = 0

    def add(self, output: SequenceOutput, logprobs: Sequence[dict[int, Logprob]] | None) -> OutputDelta:
        """Take one step's tokens; returns what it added."""
        delta = OutputDelta(self.output.index)
        taken, shown = 0, ""
        hidden = self._hidden_token(output)
        for token_id in output.token_ids:
            taken += 1
            delta.offsets.append(self._decoded_length)
            if self._text is not None and not (token_id == hidden and taken == len(output.token_ids)):
                shown += self._show(self._text.push(token_id), len(self.output.token_ids) + taken)
                if self.checker.matched is not None:
                    break
        delta.token_ids = output.token_ids[:taken]
        if self.checker.matched is not None:
            self._finish(delta, "stop", self.checker.matched)
        elif output.finish_reason is not None:
            shown += self._rest(len(self.output.token_ids) + taken)
            matched = self.checker.matched
            self._finish(delta, "stop" if matched else output.finish_reason, matched or output.stop_reason)
        delta.text = shown
        self._store(delta, logprobs)
        return delta

    def copy(self) -> CompletionOutput:
        """The answer so far, independent of what follows."""
        now = self.output
        logprobs = None if now.logprobs is None else list(now.logprobs)
        return replace(now, token_ids=list(now.token_ids), logprobs=logprobs)

    def delta_output(self, delta: OutputDelta) -> CompletionOutput:
        """``delta`` as a ``CompletionOutput``; the cumulative log-probability is that of the whole answer."""
        return replace(
            self.output,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
        )

    def _show(self, text: str, count: int) -> str:
        """``count`` tokens are there, this one included."""
        self._decoded_length += len(text)
        return self.checker.push(text, active=count >= self._min_tokens)

    def _rest(self, count: int) -> str:
        text = self._show(self._text.flush(), count) if self._text is not None else ""
        return text + self.checker.flush()

    def _hidden_token(self, output: SequenceOutput) -> int | None:
        """The stop token that ended the sequence; its text is not part of the answer (vLLM's rule)."""
        if output.finish_reason != "stop" or self._show_stop_token or not output.token_ids:
            return None
        last = output.token_ids[-1]
        return last if last == output.stop_reason or last in self._ends else None

    def _finish(self, delta: OutputDelta, reason: str, stop_reason: int | str | None) -> None:
        delta.finish_reason = self.output.finish_reason = reason
        delta.stop_reason = self.output.stop_reason = stop_reason

    def _store(self, delta: OutputDelta, logprobs: Sequence[dict[int, Logprob]] | None) -> None:
        output = self.output
        output.text += delta.text
        output.token_ids += delta.token_ids
        if logprobs is None or output.logprobs is None:
            return
        delta.logprobs = list(logprobs[: len(delta.token_ids)])
        output.logprobs += delta.logprobs
        assert output.cumulative_logprob is not None
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            output.cumulative_logprob += entry[token_id].logprob

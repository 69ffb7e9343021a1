"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qiao.engine.request import EngineRequest
from qiao.outputs import CompletionOutput, RequestOutput
from qiao.server.body import StrictRoute
from qiao.server.fleet import open_model
from qiao.server.generation import run_all
from qiao.server.logprobs import CompletionLogprobsBuilder, TokenText, prompt_logprobs
from qiao.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from qiao.server.routes.shared import (
    ERRORS,
    FINGERPRINT,
    STREAMS,
    Sent,
    UsageCounter,
    counted,
    finish_reason,
    limit_wait,
    public_id,
    sampling_params,
    wants_usage,
)
from qiao.server.state import ServerState
from qiao.server.streaming import TextEvents, event, json_answer, stream_answer, unless_gone

router = APIRouter(route_class=StrictRoute)

DEFAULT_MAX_TOKENS = 16

Requests = Sequence[tuple[EngineRequest, str | None]]


@router.post("/v1/completions", response_model=CompletionResponse, responses={**STREAMS, **ERRORS})
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    limit_wait(body)
    state, model = open_model(request, body.model, body.user)
    call = CompletionCall(state, body, model, public_id("cmpl", body, request))
    requests = await call.requests()
    if body.stream:
        return await stream_answer(request, call.stream(requests))
    return json_answer(await unless_gone(request.receive, call.collect(requests)))


class CompletionCall:
    """One call of the route."""

    def __init__(self, state: ServerState, body: CompletionRequest, model: str, call_id: str) -> None:
        self._state = state
        self._body = body
        self._base: dict[str, Any] = {
            "id": call_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._naming = TokenText(state.frontend.table, body.return_tokens_as_token_ids)
        self._usage = UsageCounter()
        self._constraint = body.constraint()

    async def requests(self) -> Requests:
        """One engine request a prompt, with the prompt's text when it must be echoed."""
        await self._state.check_grammar(self._constraint)
        return [await self._request(prompt) for prompt in self._body.prompts()]

    async def _request(self, prompt: str | list[int]) -> tuple[EngineRequest, str | None]:
        body, state = self._body, self._state
        given = body.given_sampling()
        given["logprobs"] = body.logprobs
        given["structured_outputs"] = self._constraint
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            given["prompt_logprobs"] = body.logprobs
        if self._candidates > body.n:
            given["n"] = self._candidates
            given["logprobs"] = body.logprobs or 0
        made = await state.in_worker(
            state.frontend.request,
            prompt,
            sampling_params(state, given, DEFAULT_MAX_TOKENS),
            request_id=state.engine_id(self._base["id"]),
            priority=body.priority,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens,
            strict=body.max_tokens is not None,
        )
        text = prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None
        if text is None and body.echo:
            text = await state.in_worker(state.frontend.decode, made.prompt_token_ids)
        return made, text

    @property
    def _candidates(self) -> int:
        return self._body.best_of or self._body.n

    async def collect(self, requests: Requests) -> CompletionResponse:
        """The whole answer."""
        results: dict[int, RequestOutput] = {}
        with counted(self._state):
            async with aclosing(run_all(self._state, requests)) as outputs:
                async for place, result in outputs:
                    results[place] = result
                    self._usage.note(place, result)
        choices = []
        for place, (_, text) in enumerate(requests):
            for rank, answer in enumerate(self._best(results[place].outputs)):
                choices.append(self._choice(place, rank, results[place], answer, ChoiceCursor(self, text)))
        return CompletionResponse(**self._base, choices=choices, usage=self._usage.total())

    def _best(self, answers: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        if self._candidates == self._body.n:
            return sorted(answers, key=lambda answer: answer.index)
        likeliest = sorted(answers, key=lambda a: -(a.cumulative_logprob or 0.0) / max(1, len(a.token_ids)))
        return likeliest[: self._body.n]

    async def stream(self, requests: Requests) -> AsyncGenerator[bytes, None]:
        """Chunks as they come, then the usage if asked for."""
        last, each = wants_usage(self._body.stream_options, self._state.server_args.enable_force_include_usage)
        usage: dict[str, Any] = {"usage": None} if last else {}
        cursors: dict[tuple[int, int], ChoiceCursor] = {}
        events: dict[tuple[int, int], TextEvents] = {}
        plain = not (each or self.shows_tokens)
        with counted(self._state):
            async with aclosing(run_all(self._state, requests)) as outputs:
                async for place, result in outputs:
                    self._usage.note(place, result)
                    for answer in result.outputs:
                        key = (place, answer.index)
                        if (cursor := cursors.get(key)) is None:
                            cursor = cursors[key] = ChoiceCursor(self, requests[place][1])
                            events[key] = self._text_events(place, answer.index, usage)
                        if plain and answer.finish_reason is None and not cursor.fresh:
                            if text := cursor.text(answer):
                                cursor.advance(answer)
                                yield events[key].fill(text)
                        elif cursor.has_news(answer):
                            choice = self._choice(place, answer.index, result, answer, cursor)
                            if each:
                                usage["usage"] = self._usage.total()
                            yield event(CompletionResponse(**self._base, choices=[choice], **usage))
        if last:
            yield event(CompletionResponse(**self._base, choices=[], usage=self._usage.total()))

    @property
    def shows_tokens(self) -> bool:
        """Whether the client sees more of a token than its text."""
        return self._body.logprobs is not None or self._body.return_token_ids

    def _text_events(self, place: int, number: int, usage: dict[str, Any]) -> TextEvents:
        """The events of one answer that bring text and nothing else."""
        index, base = place * self._body.n + number, self._base

        def make(text: str) -> bytes:
            choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None, stop_reason=None)
            return event(CompletionResponse(**base, choices=[choice], **usage))

        return TextEvents(make)

    def _choice(
        self, place: int, number: int, result: RequestOutput, answer: CompletionOutput, cursor: ChoiceCursor
    ) -> CompletionChoice:
        body, first = self._body, cursor.fresh
        logprobs, ids = cursor.logprobs(result, answer), answer.token_ids[cursor.tokens :]
        choice = CompletionChoice(
            index=place * body.n + number,
            text=cursor.text(answer),
            logprobs=logprobs,
            finish_reason=finish_reason(answer),
            stop_reason=answer.stop_reason,
        )
        cursor.advance(answer)
        if first and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(result.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids = list(ids)
            if first:
                choice.prompt_token_ids = list(result.prompt_token_ids)
        return choice

    @property
    def body(self) -> CompletionRequest:
        """The request's body."""
        return self._body

    @property
    def naming(self) -> TokenText:
        """How tokens are named in this answer."""
        return self._naming


class ChoiceCursor(Sent):
    """``Sent`` with the log-probabilities of what is new."""

    def __init__(self, call: CompletionCall, prompt: str | None) -> None:
        super().__init__(call.shows_tokens, (prompt or "") if call.body.echo else "")
        self._body = call.body
        self._builder = CompletionLogprobsBuilder(call.naming, call.body.skip_special_tokens is not False)

    def logprobs(self, result: RequestOutput, answer: CompletionOutput) -> CompletionLogprobs | None:
        """Entries for the new tokens, behind those of the echoed prompt the first time."""
        if self._body.logprobs is None:
            return None
        tokens: list[int] = []
        candidates: list[Any] = []
        if self.fresh and self._body.echo and result.prompt_logprobs is not None:
            tokens += result.prompt_token_ids
            candidates += result.prompt_logprobs
        elif self.fresh:
            self._builder.skip(len(self._prompt))
        tokens += answer.token_ids[self.tokens :]
        candidates += (answer.logprobs or [])[self.tokens :]
        return self._builder.build(tokens, candidates)

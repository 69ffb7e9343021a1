"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qiao.answers import AnswerParser, CallDelta, Parts
from qiao.engine.request import EngineRequest
from qiao.errors import ParameterError
from qiao.outputs import CompletionOutput, RequestOutput
from qiao.server.args import ServerArgs
from qiao.server.body import StrictRoute
from qiao.server.chat_plan import ChatPlan
from qiao.server.fleet import open_model
from qiao.server.generation import run
from qiao.server.logprobs import TokenText, chat_logprobs, prompt_logprobs
from qiao.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    Delta,
)
from qiao.server.protocol.common import FinishReason
from qiao.server.protocol.tools import AnsweredCall, CallChunk, FunctionCall, FunctionDelta
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


@router.post("/v1/chat/completions", response_model=ChatResponse, responses={**STREAMS, **ERRORS})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    limit_wait(body)
    state, model = open_model(request, body.model, body.user)
    call = ChatCall(state, body, model, public_id("chatcmpl", body, request))
    engine_request = await call.request()
    if body.stream:
        return await stream_answer(request, call.stream(engine_request))
    return json_answer(await unless_gone(request.receive, call.collect(engine_request)))


def template_options(body: ChatRequest, plan: ChatPlan, args: ServerArgs) -> dict[str, Any]:
    """What the chat template gets beside the messages."""
    extra = plan.template_kwargs
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    return {
        "chat_template_kwargs": extra,
        "content_format": args.chat_template_content_format,
        "tools": plan.tools,
        "continue_final_message": body.continue_final_message,
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
    }


class ChatCall:
    """One call of the route."""

    def __init__(self, state: ServerState, body: ChatRequest, model: str, call_id: str) -> None:
        self._state = state
        self._body = body
        self._base: dict[str, Any] = {
            "id": call_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._naming = TokenText(state.frontend.table, body.return_tokens_as_token_ids)
        self._usage = UsageCounter()
        self._plan = ChatPlan(body, state.server_args)
        self._messages = [message.plain() for message in body.messages]
        last = body.messages[-1]
        self._role = state.server_args.response_role if body.add_generation_prompt else last.role
        echoes = body.echo and last.role == self._role and isinstance(last.content, str)
        self._echo = str(last.content) if echoes else ""

    @property
    def id(self) -> str:
        """The id of the answer."""
        return str(self._base["id"])

    async def request(self) -> EngineRequest:
        """The conversation through the template and the tokeniser."""
        await self._state.check_grammar(self._plan.constraint)
        return await self._state.in_worker(self._tokenised)

    def _tokenised(self) -> EngineRequest:
        body, frontend = self._body, self._state.frontend
        given = {**body.given_sampling(), "structured_outputs": self._plan.constraint}
        if self._plan.shows_special_tokens(frontend.table.special_texts):
            given.setdefault("skip_special_tokens", False)
        params = sampling_params(self._state, given, None)
        prompt = frontend.chat_prompt(self._messages, **template_options(body, self._plan, self._state.server_args))
        self._plan.begin(prompt)
        try:
            return frontend.request(
                prompt,
                params,
                request_id=self._state.engine_id(self._base["id"]),
                priority=body.priority,
                cache_salt=body.cache_salt,
                add_special_tokens=body.add_special_tokens,
                strict=given["max_tokens"] is not None,
                grammar_after=self._plan.grammar_after,
                grammar_before=self._plan.grammar_before,
            )
        except ParameterError as error:
            if error.field == "logprobs":  # the number has another name here
                raise ParameterError("top_logprobs", error.detail) from None
            raise

    async def pieces(self, request: EngineRequest) -> AsyncGenerator[tuple[Parts, RequestOutput], None]:
        """What each step brought to the only answer, and all so far; for routes that say it in other words."""
        parser = None if self._plan.plain else self._plan.parser()
        shown = 0
        with counted(self._state):
            async with aclosing(run(self._state, request, None)) as results:
                async for result in results:
                    answer = result.outputs[0]
                    text, shown = answer.text[shown:], len(answer.text)
                    parts = Parts(content=text) if parser is None else parser.push(text)
                    if parser is not None and answer.finish_reason is not None:
                        parts.add(parser.finish())
                    yield parts, result

    async def collect(self, request: EngineRequest) -> ChatResponse:
        """The whole answer."""
        final: RequestOutput | None = None
        with counted(self._state):
            async with aclosing(run(self._state, request, None)) as results:
                async for result in results:
                    final = result
        assert final is not None, "the engine ended a request without any output"
        self._usage.note(0, final)
        choices = [self._choice(answer) for answer in sorted(final.outputs, key=lambda a: a.index)]
        response = ChatResponse(**self._base, object="chat.completion", choices=choices, usage=self._usage.total())
        if self._body.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(final.prompt_logprobs)
        if self._body.return_token_ids:
            response.prompt_token_ids = list(final.prompt_token_ids)
        return response

    def _reason(self, answer: CompletionOutput, calls: bool) -> FinishReason:
        """As OpenAI and vLLM have it: a function that was demanded by name ends with ``stop``."""
        if calls and answer.finish_reason == "stop" and not self._plan.named:
            return "tool_calls"
        return finish_reason(answer)

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        parts = Parts(content=answer.text)
        if not self._plan.plain:
            parser = self._plan.parser()
            parts = parser.push(answer.text)
            parts.add(parser.finish())
        choice = ChatChoice(
            index=answer.index,
            message=self._message(parts),
            logprobs=self._logprobs(answer, 0),
            finish_reason=self._reason(answer, bool(parts.calls)),
            stop_reason=answer.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = list(answer.token_ids)
        return choice

    def _message(self, parts: Parts) -> AssistantMessage:
        content = self._echo + parts.content
        message = AssistantMessage(role=self._role, content=content, refusal=None)
        if not content and (parts.calls or self._plan.reasons):
            message.content = None
        if self._plan.reasons:
            shown = parts.reasoning if self._body.include_reasoning else ""
            message.reasoning = message.reasoning_content = shown or None
        if parts.calls:
            message.tool_calls = [
                AnsweredCall(
                    id=call.id or "",
                    type="function",
                    function=FunctionCall(name=call.name or "", arguments=call.arguments),
                )
                for call in parts.calls
            ]
        return message

    def _logprobs(self, answer: CompletionOutput, start: int) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        new = (answer.logprobs or [])[start:]
        return chat_logprobs(answer.token_ids[start:], new, self._body.top_logprobs or 0, self._naming)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[bytes, None]:
        """The role of each answer, then what is new as it comes, then the usage if asked for."""
        last, each = wants_usage(self._body.stream_options, self._state.server_args.enable_force_include_usage)
        sent = [Sent(self._shows_tokens) for _ in range(request.params.n)]
        events = [self._text_events(index, last) for index in range(request.params.n)]
        plain = not (each or self._shows_tokens) and self._plan.plain
        parsers = [self._plan.parser() for _ in range(0 if self._plan.plain else request.params.n)]
        opened = False
        with counted(self._state):
            async with aclosing(run(self._state, request, None)) as results:
                async for result in results:
                    self._usage.note(0, result)
                    if not opened:
                        opened = True
                        for chunk in self._openings(request.params.n):
                            yield self._event(chunk, last, each, result)
                    for answer in result.outputs:
                        progress = sent[answer.index]
                        if plain and answer.finish_reason is None:
                            if text := progress.text(answer):
                                progress.advance(answer)
                                yield events[answer.index].fill(text)
                        elif progress.has_news(answer):
                            news = self._news(answer, progress, parsers[answer.index] if parsers else None)
                            if news is not None:
                                yield self._event(news, last, each)
        if last:
            usage = self._usage.total()
            yield event(ChatChunk(**self._base, object="chat.completion.chunk", choices=[], usage=usage))

    @property
    def _shows_tokens(self) -> bool:
        return bool(self._body.logprobs) or self._body.return_token_ids

    def _text_events(self, index: int, last: bool) -> TextEvents:
        """The events of answer ``index`` that bring text and nothing else."""

        def make(text: str) -> bytes:
            choice = ChunkChoice(index=index, delta=Delta(content=text), logprobs=None, finish_reason=None)
            return self._event(choice, last, False)

        return TextEvents(make)

    def _openings(self, n: int) -> list[ChunkChoice]:
        delta = Delta(role=self._role, content=self._echo)
        return [ChunkChoice(index=i, delta=delta, logprobs=None, finish_reason=None) for i in range(n)]

    def _event(self, choice: ChunkChoice, last: bool, each: bool, opening: RequestOutput | None = None) -> bytes:
        chunk = ChatChunk(**self._base, object="chat.completion.chunk", choices=[choice])
        if last:
            chunk.usage = self._usage.total() if each else None
        if opening is not None and self._body.return_token_ids:
            chunk.prompt_token_ids = list(opening.prompt_token_ids)
        return event(chunk)

    def _news(self, answer: CompletionOutput, sent: Sent, parser: AnswerParser | None) -> ChunkChoice | None:
        """The next chunk of ``answer``, None where the parser keeps all that is new."""
        text, ended = sent.text(answer), answer.finish_reason is not None
        delta = Delta(content=text) if text or self._shows_tokens else Delta()
        if parser is not None:
            parts = parser.push(text)
            if ended:
                parts.add(parser.finish())
            delta = self._delta(parts)
            if not (delta.model_fields_set or ended or self._shows_tokens):
                sent.advance(answer)
                return None
        calls = parser is not None and parser.calls > 0
        choice = ChunkChoice(
            index=answer.index,
            delta=delta,
            logprobs=self._logprobs(answer, sent.tokens),
            finish_reason=self._reason(answer, calls),
        )
        if answer.finish_reason is not None:
            choice.stop_reason = answer.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = list(answer.token_ids[sent.tokens :])
        sent.advance(answer)
        return choice

    def _delta(self, parts: Parts) -> Delta:
        delta = Delta()
        if parts.content:
            delta.content = parts.content
        if parts.reasoning and self._body.include_reasoning:
            delta.reasoning = delta.reasoning_content = parts.reasoning
        if parts.calls:
            delta.tool_calls = [_call_chunk(call) for call in parts.calls]
        return delta


def _call_chunk(call: CallDelta) -> CallChunk:
    if call.id is None:
        return CallChunk(index=call.index, function=FunctionDelta(arguments=call.arguments))
    function = FunctionDelta(name=call.name, arguments=call.arguments)
    return CallChunk(index=call.index, id=call.id, type="function", function=function)

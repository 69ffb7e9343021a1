"""``LLM``: a model in this process."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from qiao.config import EngineArgs
from qiao.engine.request import EngineRequest, EngineStats, SequenceOutput
from qiao.errors import KernelError, OverloadedError, ParameterError, PromptTooLongError, UsageError
from qiao.frontend import Frontend, OutputProcessor
from qiao.frontend.embedding import similarity, vector_of
from qiao.llm.arguments import engine_args
from qiao.llm.beam_search import search
from qiao.llm.prompts import Message, Prompt, conversations, for_each, prompt_list, prompt_parts
from qiao.loading import load_tokenizer
from qiao.lora.request import LoRARequest
from qiao.outputs import (
    BeamSearchOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from qiao.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model in this process.

    ``model`` and the keyword arguments are those of ``EngineArgs``; vLLM's others are accepted where they have no
    meaning here and refused where they would change the result. ``device`` is a plugin's name or the torch string that
    people know. Raises ``TypeError`` for an unknown argument, ``UsageError`` and ``PluginError`` as ``build_engine``.
    Not safe for several threads at once; streams may be read in turns, and ``generate`` called between two results.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self._start(engine_args(model, kwargs))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """The model that ``args`` describe. Raises as the constructor."""
        made = cls.__new__(cls)
        made._start(args)
        return made

    def _start(self, args: EngineArgs) -> None:
        from qiao.build import build_engine

        self.args = args
        built = build_engine(self.args)
        self.info = built.info
        self.plan = built.plan
        self._engine = built.engine
        self._frontend = Frontend.load(self.args, built.info)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._ids = itertools.count()
        self._inboxes: dict[str, list[SequenceOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or many prompts, each with its own or the same parameters; results in the order of the prompts.

        A prompt is text, a list of token ids, a ``TextPrompt`` or a ``TokensPrompt``. Without ``sampling_params`` the
        checkpoint's defaults apply. ``lora_request`` is the adapter of all prompts or of each; it is loaded when it is
        first seen, and stays. Every prompt is checked before the first runs. Raises ``ParameterError``,
        ``PromptTooLongError``, and ``KernelError`` when an operator fails.
        """
        wanted = prompt_list(prompts if prompt_token_ids is None else prompt_token_ids)
        return self._run(self._processors(wanted, sampling_params, priority, lora=lora_request), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template. Raises as ``generate``."""
        texts = [
            self._frontend.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                content_format=chat_template_content_format,
            )
            for conversation in conversations(messages)
        ]
        processors = self._processors(texts, sampling_params, None, False, lora_request)
        return self._run(processors, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """The answer to one prompt while it is made: one result a step, shaped by ``sampling_params.output_kind``.

        Closing the iterator aborts the request.
        """
        (processor,) = self._processors([prompt], sampling_params, None, add_special_tokens, lora_request)
        kind = processor.request.params.output_kind
        for changed in self._steps([processor]):
            snapshot = changed.snapshot(kind)
            if snapshot is not None:
                yield snapshot

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[RequestOutput]:
        """As ``stream``, for one conversation; ``template_options`` are those of ``ChatRenderer.render``."""
        text = self._frontend.chat_prompt(messages, **template_options)
        return self.stream(text, sampling_params, add_special_tokens=False)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt: the last token's hidden state or the mean, by checkpoint or ``pooler_config``.

        ``dimensions`` keeps that many numbers; ``normalize`` overrides the checkpoint's choice. Raises as ``generate``.
        """
        processors = self._pooling_processors(prompt_list(prompts), truncate_prompt_tokens)
        self._run(processors, use_tqdm)
        wanted = self._frontend.pooling.normalize if normalize is None else normalize
        return [
            EmbeddingRequestOutput(
                processor.request.request_id,
                EmbeddingOutput([float(x) for x in vector_of(processor.embedding, dimensions, wanted)]),
                processor.request.prompt_token_ids,
            )
            for processor in processors
        ]

    def score(
        self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """The cosine of the vectors of each pair; a single ``data_1`` goes with every one of ``data_2``.

        Raises as ``generate``, and ``ParameterError`` where the lengths do not fit.
        """
        first, second = prompt_list(data_1), prompt_list(data_2)
        if len(first) not in (1, len(second)):
            raise ParameterError("data_1", f"must be one prompt or as many as data_2 ({len(second)}), got {len(first)}")
        processors = self._pooling_processors([*first, *second], None)
        self._run(processors, use_tqdm)
        left, right = processors[: len(first)], processors[len(first) :]
        pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
        return [
            ScoringRequestOutput(
                b.request.request_id,
                ScoringOutput(similarity(*(vector_of(x.embedding, None, False) for x in (a, b)))),
                a.request.prompt_token_ids + b.request.prompt_token_ids,
            )
            for a, b in pairs
        ]

    def token_logits(self, token_ids: Sequence[int], start: int = 0) -> Iterator[torch.Tensor]:
        """Float32 logits [n, V] on the host, slice by slice, at the positions from ``start`` on of ``token_ids`` [T].

        The row of position p is the model's distribution of the token at p + 1, whatever is there. The sequence runs
        alone, so equal models give equal bits. No other call may come before the iterator has ended. Raises
        ``OverloadedError`` where requests run, ``ParameterError``, ``PromptTooLongError``, ``KernelError``.
        """
        return self._engine.token_logits(token_ids, start)

    @property
    def frontend(self) -> Frontend:
        """The model's text side: tokens, chat template, checks."""
        return self._frontend

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers' class."""
        if self._tokenizer is None:
            args = self.args
            name, revision = args.tokenizer or args.model, args.tokenizer_revision if args.tokenizer else args.revision
            self._tokenizer = load_tokenizer(name, args.trust_remote_code, revision, args.download_dir)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies when no parameters are given: vLLM's defaults, with the checkpoint's own on top."""
        return self._frontend.default_params()

    def get_metrics(self) -> EngineStats:
        """Counts since the start."""
        return self._engine.stats()

    def remove_lora(self, lora_int_id: int) -> bool:
        """Free a LoRA adapter; False where there is none. It is loaded again when a request names it."""
        return self._engine.adapters.remove(lora_int_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, for example after a change of weights."""
        self._engine.reset_prefix_cache()
        return True

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best continuations of each prompt, best first.

        A step of the search is an ordinary request of one token for each beam, whose prefix is in the cache. Raises as
        ``generate``, and ``ParameterError`` where ``2 * beam_width`` is more than ``max_logprobs``.
        """
        limit = self.args.max_logprobs
        if 0 <= limit < 2 * params.beam_width:
            raise ParameterError("beam_width", f"needs LLM(..., max_logprobs={2 * params.beam_width}), it is {limit}")
        processors = self._processors(prompt_list(prompts), SamplingParams(max_tokens=params.max_tokens), None)
        ids = [list(processor.request.prompt_token_ids) for processor in processors]
        longest = max(map(len, ids), default=0)
        if longest + params.max_tokens > self.info.max_model_len:
            raise PromptTooLongError(
                f"a prompt of {longest} tokens and {params.max_tokens} new ones do not fit into the context of "
                f"{self.info.max_model_len}"
            )
        with _progress(params.max_tokens, use_tqdm) as advance:
            found = search(partial(self._one_token, lora_request), ids, params, self.info.eos_token_ids, advance)
        for beams in found:
            for beam in beams:
                beam.text = self._frontend.table.decode(beam.tokens, skip_special_tokens=True)
        return [BeamSearchOutput(beams) for beams in found]

    def _one_token(
        self, lora: LoRARequest | None, prompts: list[list[int]], params: SamplingParams
    ) -> list[RequestOutput]:
        return self.generate(prompts, params, use_tqdm=False, lora_request=lora)

    def __getattr__(self, name: str) -> Any:
        """vLLM's methods that are not there are refused when called, with what to do instead."""
        if name in _NOT_THERE:
            return partial(_refuse, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _processors(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        add_special_tokens: bool = True,
        lora: LoRARequest | Sequence[LoRARequest] | None = None,
    ) -> list[OutputProcessor]:
        params = for_each(sampling_params, SamplingParams, self.get_default_sampling_params(), len(prompts))
        priorities = for_each(priority, int, 0, len(prompts), "priority")
        adapters = self._adapters(lora, len(prompts))
        made = []
        for prompt, one, level, adapter in zip(prompts, params, priorities, adapters, strict=True):
            content, text, salt = prompt_parts(prompt)
            request = self._frontend.request(
                content,
                one,
                request_id=str(next(self._ids)),
                priority=level,
                cache_salt=salt,
                add_special_tokens=add_special_tokens,
                strict=False,
            )
            if adapter is not None:
                request = msgspec.structs.replace(request, adapter=adapter.lora_int_id)
            processor = self._frontend.processor(request, text)
            processor.result.lora_request = adapter
            made.append(processor)
        return made

    def _adapters(self, lora: LoRARequest | Sequence[LoRARequest] | None, count: int) -> list[LoRARequest | None]:
        """The adapter of each prompt, loaded."""
        each = lora if isinstance(lora, Sequence) else [lora] * count
        wanted = [one for one in each if isinstance(one, LoRARequest | None)]
        if not len(each) == len(wanted) == count:
            raise ParameterError("lora_request", f"must be one LoRARequest, or one for each of the {count} prompts")
        for one in dict.fromkeys(wanted):
            if one is not None:
                self._engine.adapters.add(one)
        return wanted

    def _pooling_processors(self, prompts: Sequence[Prompt], truncate: int | None) -> list[OutputProcessor]:
        made = []
        for prompt in prompts:
            content, text, salt = prompt_parts(prompt)
            request = self._frontend.pooling_request(
                content, "prompt", request_id=str(next(self._ids)), cache_salt=salt, truncate=truncate
            )
            made.append(self._frontend.processor(request, text))
        return made

    def _run(self, processors: list[OutputProcessor], show: bool) -> list[RequestOutput]:
        with _progress(len(processors), show) as advance:
            for changed in self._steps(processors):
                if changed.finished:
                    advance()
        return [processor.result for processor in processors]

    def _steps(self, processors: Sequence[OutputProcessor]) -> Iterator[OutputProcessor]:
        """Step until all have ended; yields a processor after each of its outputs. Closing it aborts the rest."""
        running: dict[str, OutputProcessor] = {}
        waiting = deque(processors)
        try:
            while running or waiting:
                self._feed(waiting, running)
                for output in self._outputs(running):
                    processor = running.get(output.request_id)
                    if processor is None:  # a stop string ended it before this output
                        continue
                    self._take(processor, output)
                    if processor.finished:
                        del running[output.request_id]
                    yield processor
        finally:
            if running:
                self._engine.abort(list(running))
            for processor in processors:
                self._inboxes.pop(processor.request.request_id, None)

    def _outputs(self, running: Mapping[str, OutputProcessor]) -> list[SequenceOutput]:
        """What came for ``running``: in the steps of another open iterator, else in one step made now."""
        ready = self._collected(running)
        if ready:
            return ready
        for output in self._engine.step():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)
        return self._collected(running)

    def _collected(self, running: Mapping[str, OutputProcessor]) -> list[SequenceOutput]:
        found: list[SequenceOutput] = []
        for request_id in running:
            found += self._inboxes[request_id]
            self._inboxes[request_id].clear()
        return found

    def _feed(self, waiting: deque[OutputProcessor], running: dict[str, OutputProcessor]) -> None:
        """Queue as many as the engine's bounded queue takes."""
        while waiting:
            request: EngineRequest = waiting[0].request
            try:
                self._engine.add_request(request)
            except OverloadedError:
                if not self._engine.has_work():
                    raise
                return
            self._inboxes[request.request_id] = []
            running[request.request_id] = waiting.popleft()

    def _take(self, processor: OutputProcessor, output: SequenceOutput) -> None:
        processor.add(output)
        if output.error is not None:
            failure = output.failure()
            raise (
                failure
                if isinstance(failure, ParameterError)
                else KernelError(f"request {output.request_id}: {output.error}")
            )
        for index in processor.to_abort:
            self._engine.abort([output.request_id], index)


_NO_POOLING = "there are embed and score; heads for classes and rewards are not served"

_NOT_THERE: Mapping[str, str] = {
    **dict.fromkeys(("encode", "classify", "reward"), _NO_POOLING),
    **dict.fromkeys(("sleep", "wake_up"), "delete the LLM to free its memory, and make it again"),
    **dict.fromkeys(("start_profile", "stop_profile"), "profile the process, for example with py-spy"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "there is one worker, in this process"),
}
"""vLLM's methods, and what to do instead."""


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(f"LLM.{name} is not there: {_NOT_THERE[name]}")


def _progress(total: int, show: bool) -> Any:
    """A context whose value is called once for each finished prompt."""
    if not show or total < 2 or not sys.stderr.isatty():
        return nullcontext(lambda: None)
    return _bar(total)


def _bar(total: int) -> Any:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar() -> Iterator[Any]:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("Prompts", total=total)
            yield lambda: progress.advance(task)

    return bar()

"""One of the two models while it is loaded: answers, tokens, distributions, and facts for the report."""

from __future__ import annotations

import gc
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch

from qiao.config import EngineArgs
from qiao.errors import KernelError, QiaoError, UsageError
from qiao.llm import LLM
from qiao.regress.suite import Case
from qiao.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. ``token_ids`` include the one that ended it; ``pieces`` are their texts, for showing."""

    token_ids: list[int]
    pieces: list[str]
    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What a report says of a model. ``settings`` are the arguments that are not the defaults."""

    name: str
    settings: dict[str, str]
    device: str
    dtype: str
    kv_cache_dtype: str
    schemes: list[str]
    weight_bytes: int
    vocab_size: int


class Side:
    """A loaded model under one of the two specs."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.vocab_size = llm.info.vocab_size
        self.has_chat_template = llm.frontend.chat.available

    def facts(self) -> Facts:
        """See ``Facts``."""
        args, info, plan = self._llm.args, self._llm.info, self._llm.plan
        defaults = {f.name: getattr(EngineArgs(model=args.model), f.name) for f in fields(EngineArgs)}
        changed = {n: str(getattr(args, n)) for n, default in defaults.items() if getattr(args, n) != default}
        weights = sum(int(item["bytes"]) for item in plan.as_dict()["weights"])
        return Facts(
            args.model,
            changed,
            info.device,
            info.dtype,
            info.kv_cache_dtype,
            list(plan.shape.schemes),
            weights,
            info.vocab_size,
        )

    def prompt_ids(self, case: Case) -> list[int]:
        """The case's prompt as this model reads it; without a chat template, messages are joined by newlines."""
        frontend = self._llm.frontend
        if case.prompt is not None:
            return frontend.encode(case.prompt)
        messages = [{"role": m.role, "content": m.content} for m in case.messages or ()]
        if not self.has_chat_template:
            return frontend.encode("\n".join(m["content"] for m in messages) + "\n")
        return frontend.encode(frontend.chat_prompt(messages), add_special_tokens=False)

    def text_ids(self, text: str) -> list[int]:
        """Tokens of a text that follows a prompt."""
        return self._llm.frontend.encode(text, add_special_tokens=False)

    def vocabulary(self) -> list[bytes]:
        """The bytes of each token of the vocabulary."""
        frontend = self._llm.frontend
        return [frontend.token_bytes(i) for i in range(self.vocab_size)]

    def labels(self, token_ids: Sequence[int]) -> list[str]:
        """Token texts for showing."""
        return [self._llm.frontend.table.label(i) for i in token_ids]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds; a character of several tokens belongs to the one that completes it."""
        decoder = getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self._llm.frontend.token_bytes(i)) for i in token_ids]

    def answers(self, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[Answer]:
        """Greedy answers to tokenized prompts, computed together."""
        params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in max_tokens]
        results = self._llm.generate(list(prompts), params, use_tqdm=False)
        outputs = [result.outputs[0] for result in results]
        return [
            Answer(out.token_ids, self.pieces(out.token_ids), out.text, out.finish_reason == "stop") for out in outputs
        ]

    def logits(self, prompt: list[int], continuation: list[int]) -> Iterator[torch.Tensor]:
        """Float32 logits [n, V], slice by slice, whose rows are the distributions of ``continuation``'s tokens.

        Raises ``KernelError`` where they are not finite.
        """
        tokens = prompt + continuation[:-1]
        for rows in self._llm.token_logits(tokens, len(prompt) - 1):
            if not bool(rows.isfinite().all()):
                raise KernelError(f"{self._llm.args.model}: its logits hold NaN or infinity")
            yield rows


@contextmanager
def loaded(args: EngineArgs) -> Iterator[Side]:
    """The model that ``args`` describe, while the context lasts. Its memory is free once no other name refers to it."""
    gc.collect()  # what a model before it left in reference cycles
    yield Side(LLM.from_engine_args(args))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put ``what`` before the message of an error of Qiao."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error
    except KernelError as error:
        raise KernelError(f"{what}: {error}") from error
    except QiaoError as error:
        raise QiaoError(f"{what}: {error}") from error


@dataclass
class Notes:
    """Remarks for the report, each once: key of a text, and its values."""

    found: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def add(self, key: str, **values: object) -> None:
        """One remark."""
        self.found.append((key, {name: str(value) for name, value in values.items()}))

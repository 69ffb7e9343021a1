"""Sampling parameters as vLLM's users write them, checked with the field's name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Any

import msgspec

from qiao.errors import ParameterError
from qiao.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

GuidedDecodingParams = StructuredOutputsParams
"""vLLM's old name."""

GREEDY_EPS = 1e-5
"""Temperatures below are greedy (vLLM's rule). Those above are taken as they are: vLLM raises them to 0.01, at which it
draws a token that is hardly less likely now and then. Logits are scaled behind their maximum: none overflows."""

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SEED = (1 << 63) - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""Beyond these a logit overflows float32 and no token can be chosen."""


class RequestOutputKind(Enum):
    """What a streaming consumer receives: all so far, only the new part, or the end only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Arguments of ``LLM.beam_search``, as vLLM has them.

    A beam's score is its log-probability divided by its length, the prompt's included, to the ``length_penalty``.

    Raises ``ParameterError`` naming the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(name, f"must be an integer of at least 1, got {value!r}")
        if not isinstance(self.length_penalty, int | float) or not math.isfinite(self.length_penalty):
            raise ParameterError("length_penalty", f"must be a number, got {self.length_penalty!r}")
        if self.include_stop_str_in_output:
            raise ParameterError("include_stop_str_in_output", "beams stop at the model's end tokens alone")


_REFUSED: Mapping[str, str] = {
    "logits_processors": "functions are not called between steps; use logit_bias, allowed_token_ids or bad_words",
    "extra_args": "nothing here reads them; leave them out",
    "flat_logprobs": "log-probabilities come as a list of dicts; leave it out",
    "skip_reading_prefix_cache": "use another cache_salt in the prompt, or LLM.reset_prefix_cache()",
    "thinking_token_budget": "is not there; max_tokens limits the whole answer",
}
"""vLLM's fields that would change answers and are not there, and what to do instead."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to pick tokens and when to stop. Field names, defaults and rules are vLLM's.

    ``temperature`` 0 is greedy; ``top_k`` 0 or -1 is off; ``max_tokens`` None means "up to the context";
    ``logprobs`` k returns the sampled token's and the k best log-probabilities (-1: whole vocabulary).
    ``best_of`` above ``n`` is for ``/v1/completions`` alone. ``spaces_between_special_tokens`` has no effect, as with
    vLLM's fast tokenizers. ``structured_outputs`` is what the answer must look like; ``guided_decoding`` is its old
    name. The last five fields of vLLM's are refused unless they are empty; see ``_REFUSED``.

    Raises ``ParameterError`` naming the field.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    bad_words_token_ids: list[list[int]] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    logits_processors: Any = None
    extra_args: Any = None
    flat_logprobs: Any = None
    skip_reading_prefix_cache: Any = None
    thinking_token_budget: Any = None

    def __post_init__(self) -> None:
        for name, instead in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False and value != [] and value != {}:
                raise ParameterError(name, instead)
            setattr(self, name, None)
        self._take_constraint()
        self._normalise()
        self._check_numbers()
        self._check_lists()

    @property
    def greedy(self) -> bool:
        """Whether the arg max is taken."""
        return self.temperature < GREEDY_EPS

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def clone(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def _take_constraint(self) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                value = _from_mapping(name, value) if value else None
            elif value is not None and not isinstance(value, StructuredOutputsParams):
                raise ParameterError(name, f"must be StructuredOutputsParams(...), got {value!r:.100}")
            setattr(self, name, value)
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ParameterError("guided_decoding", "is the old name of structured_outputs; give one of them")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None

    def _normalise(self) -> None:
        if self.seed == -1:
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            elif getattr(self, name) is False:
                setattr(self, name, None)
        for name in self.__struct_fields__:
            setattr(self, name, _plain(getattr(self, name)))
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "bad_words_token_ids"):
            setattr(self, name, _listed(name, getattr(self, name)))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ParameterError("logit_bias", f"must map token ids to biases, got {self.logit_bias!r:.100}")
        if self.logit_bias:
            self.logit_bias = self._clamped_bias(self.logit_bias)

    @staticmethod
    def _clamped_bias(bias: dict[int, float]) -> dict[int, float]:
        if len(bias) > MAX_LOGIT_BIAS:
            raise ParameterError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
        clean: dict[int, float] = {}
        for key, value in bias.items():
            try:
                token = int(key)
                if not isinstance(key, str) and token != key:
                    raise ValueError
            except (TypeError, ValueError):
                raise ParameterError("logit_bias", f"keys are token ids, got {key!r}") from None
            value = _plain(value)
            if not isinstance(value, (int, float)) or math.isnan(value):
                raise ParameterError("logit_bias", f"the value of {key!r} must be a number, got {value!r}")
            clean[token] = max(-100.0, min(100.0, float(value)))
        return clean

    def _check_numbers(self) -> None:
        self._within("n", 1, MAX_N, integer=True)
        if self.best_of is not None:
            self._within("best_of", self.n, MAX_N, integer=True)
        self._within("presence_penalty", -2.0, 2.0)
        self._within("frequency_penalty", -2.0, 2.0)
        self._within("temperature", 0.0, 2.0)
        self._within("min_p", 0.0, 1.0)
        self._within("top_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError("top_p", "must be in (0, 1], got 0")
        self._within("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        self._within("top_k", -1, (1 << 31) - 1, integer=True)
        if self.seed is not None:
            self._within("seed", -MAX_SEED - 1, MAX_SEED, integer=True)
        if self.max_tokens is not None:
            self._within("max_tokens", 0, (1 << 31) - 1, integer=True)
        self._within("min_tokens", 0, (1 << 31) - 1, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._within(name, -1, (1 << 31) - 1, integer=True)
        if self.truncate_prompt_tokens is not None:
            self._within("truncate_prompt_tokens", -1, (1 << 31) - 1, integer=True)
            if self.truncate_prompt_tokens == 0:
                raise ParameterError("truncate_prompt_tokens", "must be -1 or at least 1, got 0")

    def _within(self, name: str, low: float, high: float, integer: bool = False) -> None:
        value = getattr(self, name)
        kinds: tuple[type, ...] = (int,) if integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ParameterError(name, f"must be {'an integer' if integer else 'a number'}, got {value!r}")
        assert isinstance(value, (int, float))
        if not low <= value <= high:  # also false for nan
            raise ParameterError(name, f"must be between {low} and {high}, got {value}")

    def _check_lists(self) -> None:
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ParameterError("stop", "must not contain an empty string")
            if len(text) > MAX_STOP_LENGTH:
                raise ParameterError("stop", f"a stop string has {len(text)} characters, at most {MAX_STOP_LENGTH}")
        if stops and not self.detokenize:
            raise ParameterError("stop", "stop strings need detokenize=True")
        if self.bad_words is not None and len(self.bad_words) > MAX_BAD_WORDS:
            raise ParameterError("bad_words", f"at most {MAX_BAD_WORDS} words, got {len(self.bad_words)}")
        for word in self.bad_words or ():
            if not isinstance(word, str) or not word:
                raise ParameterError("bad_words", f"must hold non-empty strings, got {word!r:.100}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError("allowed_token_ids", "must not be empty")

    def check_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Refuse token ids outside ``[0, vocab_size)`` and more than ``max_logprobs`` alternatives.

        Raises ``ParameterError`` naming the field.
        """
        named: tuple[tuple[str, Any], ...] = (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
        )
        for name, ids in named:
            for token in ids or ():
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise ParameterError(name, f"token id {token!r} is outside the vocabulary of {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and (vocab_size if wanted == -1 else wanted) > max_logprobs:
                raise ParameterError(name, f"at most {max_logprobs} (--max-logprobs), got {wanted}")


def _from_mapping(name: str, value: Mapping[str, Any]) -> StructuredOutputsParams:
    unknown = set(value) - set(StructuredOutputsParams.__struct_fields__)
    if unknown:
        raise ParameterError(name, f"has no field {sorted(map(str, unknown))[0]!r}")
    return StructuredOutputsParams(**value)


def _plain(value: Any) -> Any:
    """A number of numpy or torch's kind as Python's own, so that it can be sent; anything else as it is."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _listed(name: str, value: Any) -> list[Any] | None:
    """Any collection as a list with plain numbers. Raises ``ParameterError`` for a single value."""
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterError(name, f"must be a list, got {value!r:.100}")
    return [_plain(item) for item in value]

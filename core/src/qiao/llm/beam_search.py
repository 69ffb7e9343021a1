"""Beam search as vLLM's offline API has it: steps of one token over all beams, on top of ordinary generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from qiao.outputs import BeamSearchSequence, RequestOutput
from qiao.sampling_params import BeamSearchParams, SamplingParams

Step = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Continues each list of token ids."""


@dataclass
class _Search:
    """One prompt: the beams that go on, and those that have ended."""

    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def search(
    step: Step,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos_ids: Collection[int],
    advance: Callable[[], None] = lambda: None,
) -> list[list[BeamSearchSequence]]:
    """The ``beam_width`` best continuations of each prompt of token ids, best first, their prompts included.

    Each step looks at the ``2 * beam_width`` likeliest tokens of each beam, as vLLM does, so that beams that end leave
    enough to go on with. ``advance`` is called after each step.
    """
    ends = () if params.ignore_eos else eos_ids
    searches = [_Search([BeamSearchSequence(tokens=list(prompt))]) for prompt in prompts]
    one = SamplingParams(
        logprobs=2 * params.beam_width,
        max_tokens=1,
        temperature=params.temperature,
        detokenize=False,
        ignore_eos=True,
    )
    for _ in range(params.max_tokens):
        live = [beam for each in searches for beam in each.beams]
        if not live:
            break
        results = iter(step([beam.tokens for beam in live], one))
        for each in searches:
            _grow(each, [next(results) for _ in each.beams], params.beam_width, ends)
        advance()
    return [_best(each, params, eos_ids) for each in searches]


def _grow(search: _Search, results: Sequence[RequestOutput], width: int, ends: Collection[int]) -> None:
    grown = []
    for beam, result in zip(search.beams, results, strict=True):
        (candidates,) = result.outputs[0].logprobs or [{}]
        for token, found in candidates.items():
            longer = BeamSearchSequence(
                tokens=[*beam.tokens, token],
                logprobs=[*beam.logprobs, candidates],
                cum_logprob=beam.cum_logprob + found.logprob,
            )
            if token in ends:
                longer.finish_reason, longer.stop_reason = "stop", token
                search.ended.append(longer)
            else:
                grown.append(longer)
    search.beams = sorted(grown, key=lambda beam: -beam.cum_logprob)[:width]


def _best(search: _Search, params: BeamSearchParams, eos_ids: Collection[int]) -> list[BeamSearchSequence]:
    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in eos_ids)
        return beam.cum_logprob / math.pow(max(1, length), params.length_penalty)

    for beam in search.beams:
        beam.finish_reason = "length"
    return sorted(search.ended + search.beams, key=lambda beam: -score(beam))[: params.beam_width]

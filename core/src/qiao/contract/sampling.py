"""Sampling family. Group S: it moves together with the logits."""

from __future__ import annotations

import torch

from qiao.contract.markers import hookspec
from qiao.contract.types import LogprobOutput, PenaltyTensors, SamplingTensors


class SamplingSpec:
    """Hooks that turn logits into tokens."""

    @hookspec
    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        """Token ids [N] int64 from ``logits`` [N, V] float32.

        Temperature 0 takes the arg max (lowest id on a tie). Else, in order: divide by temperature, keep the ``top_k``
        most likely, keep the smallest set whose mass reaches ``top_p`` (the token that crosses it included), keep
        tokens with at least ``min_p`` times the largest probability, renormalise, then invert the cumulative
        distribution at ``uniform`` in order of falling probability (ties: lower id first).

        A row whose largest logit is not finite (NaN, or no token allowed) may get any id and must not raise or change
        another row: the engine refuses that row alone.
        """
        raise NotImplementedError

    @hookspec
    def apply_penalties(self, logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
        """Optional. ``logits`` [N, V] float32 changed in place and returned.

        Repetition (arXiv 1909.05858, section 4.1): divide positive, multiply negative logits of tokens seen in prompt
        or output. Then subtract ``frequency * count`` and ``presence * (count > 0)``, counts over the output only
        (OpenAI's API reference).
        """
        raise NotImplementedError

    @hookspec
    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobOutput:
        """Optional. Log-softmax of ``logits`` [N, V] at ``token_ids`` [N], its rank, and the ``top`` largest."""
        raise NotImplementedError

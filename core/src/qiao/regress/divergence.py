"""How far one next-token distribution lies from another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Each array has one entry a position.

    ``kl`` is KL(base || candidate) in nats, ``same_top`` whether both put the same token first, the others the natural
    log-probabilities that each gives to the token that follows.
    """

    kl: Floats
    same_top: npt.NDArray[np.bool_]
    base_logprob: Floats
    logprob: Floats

    @classmethod
    def between(cls, base: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Divergence:
        """Of logits ``base`` and ``candidate`` [N, V] at the same positions, whose next tokens are ``targets`` [N].

        KL(base || candidate) = sum over the vocabulary of p_base * (log p_base - log p_candidate), in float64;
        exactly 0 for equal logits. Rounding may leave less than 0, which no divergence is.
        """
        p, q = (logits.double().log_softmax(-1) for logits in (base, candidate))
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
        chosen = targets[:, None]
        return cls(
            kl.numpy(),
            (p.argmax(-1) == q.argmax(-1)).numpy(),
            p.gather(-1, chosen)[:, 0].numpy(),
            q.gather(-1, chosen)[:, 0].numpy(),
        )

    @classmethod
    def joined(cls, parts: list[Divergence]) -> Divergence:
        """The positions of ``parts`` in order; none for no part."""
        if not parts:
            return cls(np.zeros(0), np.zeros(0, np.bool_), np.zeros(0), np.zeros(0))
        return cls(
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.same_top for part in parts]),
            np.concatenate([part.base_logprob for part in parts]),
            np.concatenate([part.logprob for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.kl)

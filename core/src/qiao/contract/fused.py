"""Fused family: optional hooks, each replacing the sequence of the same name in ``qiao.contract.composites``."""

from __future__ import annotations

import torch

from qiao.contract.markers import hookspec
from qiao.contract.types import KVCache


class FusedSpec:
    """Light operators. A plugin that lacks one runs the sequence on its own torch backend."""

    @hookspec
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Optional. Replaces ``composites.rms_norm``; ``x`` [..., E], ``weight`` [E]."""
        raise NotImplementedError

    @hookspec
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Optional. Replaces ``composites.add_rms_norm``; may reuse its inputs' memory for the results."""
        raise NotImplementedError

    @hookspec
    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Optional. Replaces ``composites.rotary``; may work in place."""
        raise NotImplementedError

    @hookspec
    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Optional. Replaces ``composites.silu_mul``; ``x`` [T, 2F] to [T, F]."""
        raise NotImplementedError

    @hookspec
    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Optional. Replaces ``composites.gelu_mul``; ``x`` [T, 2F] to [T, F]."""
        raise NotImplementedError

    @hookspec
    def cap_logits(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Optional. Since 1.1. Replaces ``composites.cap_logits``; ``logits`` [N, V] float32; may work in place."""
        raise NotImplementedError

    @hookspec
    def route_experts(self, logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Optional. Since 1.1. Replaces ``composites.route_experts``; ``logits`` [T, X], both results [T, A]."""
        raise NotImplementedError

    @hookspec
    def combine_experts(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Optional. Since 1.1. Replaces ``composites.combine_experts``; ``x`` [T, A, E], ``weights`` [T, A]."""
        raise NotImplementedError

    @hookspec
    def rope_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Optional. Replaces ``rotary`` then ``write_kv``; returns the rotated query. Group KV."""
        raise NotImplementedError

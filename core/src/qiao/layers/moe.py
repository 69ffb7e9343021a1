"""Mixtures of experts: a router sends each token to its best few feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qiao.layers.linear import single
from qiao.layers.mlp import GatedMlp, MlpSpec
from qiao.layers.weights import Target
from qiao.optable import OpTable
from qiao.quantization import NO_FORMS, Forms


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """``num_experts`` layers of ``expert``, ``top_k`` a token.

    ``normalise`` makes a token's chosen weights sum to 1. ``shared`` is an expert that every token visits, weighed by a
    sigmoid gate.
    """

    num_experts: int
    top_k: int
    expert: MlpSpec
    normalise: bool
    shared: MlpSpec | None = None


class MoeMlp:
    """Routing as in transformers: softmax over all experts in float32, then the ``top_k`` largest."""

    def __init__(
        self, ops: OpTable, dtype: torch.dtype, name: str, hidden_size: int, spec: MoeSpec, *, forms: Forms = NO_FORMS
    ) -> None:
        self._spec = spec
        self._router = single(ops, dtype, f"{name}.gate", hidden_size, spec.num_experts, forms=forms)
        self._experts = [
            GatedMlp(ops, dtype, f"{name}.experts.{i}", hidden_size, spec.expert, forms=forms)
            for i in range(spec.num_experts)
        ]
        self._shared: GatedMlp | None = None
        if spec.shared is not None:
            self._shared = GatedMlp(ops, dtype, f"{name}.shared_expert", hidden_size, spec.shared, forms=forms)
            self._shared_gate = single(ops, dtype, f"{name}.shared_expert_gate", hidden_size, 1, forms=forms)

    def targets(self) -> dict[str, Target]:
        """Targets of the router and of all experts."""
        found = self._router.targets()
        for expert in self._experts:
            found.update(expert.targets())
        if self._shared is not None:
            found.update(self._shared.targets())
            found.update(self._shared_gate.targets())
        return found

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E]; returns [T, E]. Reads the token counts of the experts on the host, once."""
        weights, experts = self._route(x)
        mixed = self._visit(x, weights, experts)
        if self._shared is None:
            return mixed
        return mixed + torch.sigmoid(self._shared_gate(x)) * self._shared(x)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, experts = torch.topk(shares, self._spec.top_k, dim=-1)
        if self._spec.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def _visit(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert, one pass over each expert that got any, results put back in the token's own order.

        A token's results are added in order of its choice, so its sum does not depend on the rest of the batch.
        """
        tokens, chosen = experts.shape
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self._spec.num_experts).tolist()
        pieces = x.index_select(0, order // chosen).split(counts)
        done = [expert(piece) for expert, piece in zip(self._experts, pieces, strict=True) if piece.shape[0]]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        results = torch.cat(done).index_select(0, back).view(tokens, chosen, -1)
        return (results * weights.unsqueeze(-1)).sum(dim=1)

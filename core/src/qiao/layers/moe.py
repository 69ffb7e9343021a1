"""Mixtures of experts: a router sends each token to its best few feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from qiao.contract import PackedWeight
from qiao.layers.linear import Linear, single
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
    """Routing as in transformers: softmax over all experts in float32, then the ``top_k`` largest.

    Where the device has ``expert_matmul`` for the experts' weights, a layer is the same calls whatever is chosen.
    """

    def __init__(
        self, ops: OpTable, dtype: torch.dtype, name: str, hidden_size: int, spec: MoeSpec, *, forms: Forms = NO_FORMS
    ) -> None:
        self._spec, self._ops = spec, ops
        self._stacks: list[_Stack | None] = []
        self._router = single(ops, dtype, f"{name}.gate", hidden_size, spec.num_experts, forms=forms)
        self._experts = [
            GatedMlp(ops, dtype, f"{name}.experts.{i}", hidden_size, spec.expert, forms=forms)
            for i in range(spec.num_experts)
        ]
        self._shared: GatedMlp | None = None
        if spec.shared is not None:
            self._shared = GatedMlp(ops, dtype, f"{name}.shared_expert", hidden_size, spec.shared, forms=forms)
            self._shared_gate = single(ops, dtype, f"{name}.shared_expert_gate", hidden_size, 1, forms=forms)

    def linears(self) -> list[Linear]:
        """The layers that may have adapters: those of the shared expert, if there is one."""
        return [] if self._shared is None else self._shared.linears()

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
        """``x`` [T, E]; returns [T, E].

        Without ``expert_matmul`` the token counts of the experts are read on the host, once.
        """
        weights, experts = self._ops.route_experts(self._router(x), self._spec.top_k, self._spec.normalise)
        together = self._together()
        results = self._visit(x, experts) if together is None else self._visit_together(x, experts, *together)
        mixed = self._ops.combine_experts(results.view(*experts.shape, -1), weights)
        if self._shared is None:
            return mixed
        return mixed + torch.sigmoid(self._shared_gate(x)) * self._shared(x)

    def _together(self) -> tuple[_Stack, _Stack] | None:
        """Gate and up, and down, of all experts as ``expert_matmul`` takes them; None where it cannot."""
        if not self._stacks:
            self._stacks = [
                _stack(self._ops, [getattr(e, part) for e in self._experts]) for part in ("gate_up", "down")
            ]
        first, second = self._stacks
        return None if first is None or second is None else (first, second)

    def _visit_together(self, x: torch.Tensor, experts: torch.Tensor, gate_up: _Stack, down: _Stack) -> torch.Tensor:
        """Each token once for each of its experts, in order of choice: [T * A, E]."""
        tokens, chosen = experts.shape
        rows = x.unsqueeze(1).expand(tokens, chosen, x.shape[1]).reshape(tokens * chosen, x.shape[1])
        flat = experts.reshape(-1)
        return down(self._experts[0].activate(gate_up(rows, flat)), flat)

    def _visit(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert, one pass over each expert that got any, results put back in the token's own order.

        A token's results lie in order of its choice, so its sum does not depend on the rest of the batch.
        """
        chosen = experts.shape[1]
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self._spec.num_experts).tolist()
        pieces = x.index_select(0, order // chosen).split(counts)
        done = [expert(piece) for expert, piece in zip(self._experts, pieces, strict=True) if piece.shape[0]]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return torch.cat(done).index_select(0, back)


_Stack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows [n, I] and the expert of each [n] to [n, O]."""


def _stack(ops: OpTable, layers: Sequence[Linear]) -> _Stack | None:
    """The layers as one product with a chosen weight; None where the device has none for them."""
    weights = [weight for layer in layers if (weight := layer.alone) is not None]
    schemes = {layer.scheme for layer in layers}
    multiply = ops.matmul[layers[0].scheme].expert_matmul
    if multiply is None or len(schemes) > 1 or len(weights) < len(layers):
        return None
    return partial(_chosen, multiply, tuple(weights))


def _chosen(
    multiply: Callable[[torch.Tensor, Sequence[PackedWeight], torch.Tensor], torch.Tensor],
    weights: tuple[PackedWeight, ...],
    x: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    return multiply(x, weights, experts)

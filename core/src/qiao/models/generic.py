"""Any decoder that transformers knows and Qiao does not: its own code over the OpTable's attention and matmul.

The model is described by running it once on the meta device (``generic_trace``), built there, filled tensor by tensor
(``generic_load``), and, before it serves, checked against transformers' own attention on a few tokens with the real
weights: a layer that mixes tokens behind the cache's back (a convolution, a recurrence, positions counted from the
start of the batch) shows there and is refused, rather than answering wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PretrainedConfig

from qiao.contract import AttentionMetadata, KVCache, ModelShape
from qiao.models import generic_attention as routes
from qiao.models.generic_layers import OpLinear
from qiao.models.generic_load import Loader, fill_buffers
from qiao.models.generic_trace import (
    Trace,
    architecture_of,
    as_config,
    decoder_of,
    head_of,
    refuse,
    set_experts,
    shape_of,
    trace,
)
from qiao.optable import OpTable
from qiao.quantization import Weight

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def describe_generic(config: PretrainedConfig | dict[str, Any], dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of ``config``'s model from its config alone; ``dtype`` is the config's own where None.

    Raises ``ModelError`` naming the architecture and what the contract cannot express.
    """
    made = as_config(config)
    wanted = dtype or _config_dtype(made)
    return shape_of(trace(made, wanted), wanted)


def create_generic(
    config: PretrainedConfig | dict[str, Any], ops: OpTable, dtype: torch.dtype, check: bool = True
) -> GenericModel:
    """The model of ``config`` over ``ops``, without weights yet; ``check`` compares it once loaded (see module).

    Raises ``ModelError`` as ``describe_generic``.
    """
    made = as_config(config)
    return GenericModel(trace(made, dtype), ops, dtype, check)


def _config_dtype(config: PretrainedConfig) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.removeprefix("torch."), torch.float32)
    return dtype or torch.float32


class GenericModel:
    """``qiao.models.base.Model`` around a transformers model."""

    def __init__(self, traced: Trace, ops: OpTable, dtype: torch.dtype, check: bool) -> None:
        self.shape = shape_of(traced, dtype)
        self._architecture = architecture_of(traced.model.config)  # type: ignore[arg-type]
        self._calls = traced.calls
        self._ops = ops
        self._dtype = dtype
        self._check = check
        self._model = traced.model
        # One product per expert in use: plain torch, no copy of the weights per token, the same on any device.
        set_experts(self._model, "eager")
        self._swap_linears({**traced.linears, **traced.head_linears})
        self._decoder = decoder_of(self._model)
        self._head = head_of(self._model)
        self._route = routes.PagedRoute(ops, traced.calls)

    def _swap_linears(self, names: Iterable[str]) -> None:
        for name in names:
            owner, _, part = name.rpartition(".")
            linear = OpLinear(name, self._model.get_submodule(name), self._ops.matmul["dense"], self._dtype)
            setattr(self._model.get_submodule(owner), part, linear)

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take a checkpoint's tensors by name, then check the model with them.

        Raises ``ModelError`` naming a tensor that is missing, unexpected or of another shape, or where the model's
        answer changes when sequences share a batch or a prompt is cut in two.
        """
        fill_buffers(self._model, self._architecture, self._ops.device)
        Loader(self._model, self._ops.device).load(weights)
        if self._check:
            self._check_against_own_attention()
        self._use(routes.SERVE, self._route)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Final hidden states [T, E] of ``token_ids`` and ``positions`` [T] int64, both on the compute device."""
        self._route.begin(caches, metadata)
        hidden = self._run(token_ids, positions)
        self._route.finish()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, V] of ``hidden`` [N, E], scaled and capped as the model's own code does."""
        with torch.no_grad():
            logits: torch.Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = self._decoder(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _use(self, implementation: str, route: routes.Route) -> None:
        self._model.config._attn_implementation = implementation  # type: ignore[union-attr]
        routes.set_route(self._model, route)

    def _check_against_own_attention(self) -> None:
        """Two packed rows, one of them cut in two, against each row alone with transformers' eager attention."""
        vocab = self.shape.vocab_size
        rows = tuple([(7 * i + 3 * r + 1) % vocab for i in range(n)] for r, n in enumerate((6, 4)))
        self._use("eager", self._route)
        wanted = [self._run(*self._tokens(row, range(len(row)))) for row in rows]
        dense = routes.DenseRoute(self._calls, len(rows))
        self._use(routes.SERVE, dense)
        dense.begin((4, 4))
        first = self._run(*self._tokens(rows[0][:4] + rows[1], (*range(4), *range(4))))
        dense.begin((2, 0))
        last = self._run(*self._tokens(rows[0][4:], (4, 5)))
        limit = _CHECK_TOLERANCE.get(self._dtype, 1e-1)
        for got, want, fault in (
            (first[:4], wanted[0][:4], "shares state between the sequences of a batch"),
            (first[4:], wanted[1], "shares state between the sequences of a batch"),
            (last, wanted[0][4:], "keeps state that is not in the KV cache, or counts positions itself"),
        ):
            error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6)
            if not bool(error <= limit):
                raise refuse(self._architecture, f"it {fault} (difference {float(error):.2g})")

    def _tokens(self, ids: list[int], positions: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(ids).to(self._ops.device), torch.tensor(list(positions)).to(self._ops.device)


__all__ = ["GenericModel", "create_generic", "describe_generic"]

"""The output head: hidden states to float32 logits."""

from __future__ import annotations

import torch
from torch.nn import functional

from qiao.layers.embedding import Embedding
from qiao.layers.linear import single
from qiao.layers.weights import Target, floating
from qiao.optable import OpTable
from qiao.quantization import NO_FORMS, Forms, QuantizedWeight, Weight


class Head:
    """Logits of ``hidden`` [N, E]: a linear layer [V, E], tied to the embedding or its own, then a soft cap.

    ``normalise`` makes each row of the weight unit length once (Baichuan 2's NormHead). ``soft_cap`` 0.0 means none.
    """

    def __init__(
        self,
        ops: OpTable,
        dtype: torch.dtype,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        soft_cap: float = 0.0,
        normalise: bool = False,
        forms: Forms = NO_FORMS,
    ) -> None:
        self._ops = ops
        self._linear = single(ops, dtype, name, hidden_size, vocab_size, forms=forms)
        self._name, self._shape, self._dtype = name, (vocab_size, hidden_size), dtype
        self._tied, self._soft_cap, self._normalise = tied, soft_cap, normalise
        self._own: Weight | None = None

    def targets(self) -> dict[str, Target]:
        """The weight [V, E]."""
        found = self._linear.targets()
        found[f"{self._name}.weight"] = Target(self._shape, self._keep, packed=not self._tied)
        return found

    def _keep(self, weight: Weight) -> None:
        self._own = weight

    def finish(self, embedding: Embedding) -> None:
        """After the last tensor: settle what is tied to what, and pack.

        A checkpoint that is marked as tied may still hold a head. An equal one is dropped; another one is used, since
        it was trained; where the embedding is the missing one, the head stands in for it (as transformers 5 does).
        """
        own, self._own = self._own, None
        shared = embedding.take_source()
        if self._tied and shared is None and own is not None:
            embedding.put(own)
            shared = embedding.take_source()
        if isinstance(own, torch.Tensor):
            own = floating(f"{self._name}.weight", own, self._dtype)
        if shared is not None and self._tied and (own is None or _equal(own, shared)):
            own = shared
        assert own is not None, "the loader has seen a head, or an embedding that it is tied to"
        if self._normalise:
            own = functional.normalize(floating(self._name, own, torch.float32), dim=-1).to(self._dtype)
        self._linear.targets()[f"{self._name}.weight"].put(own)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [N, E]; returns float32 [N, V]."""
        logits = self._linear(hidden).float()
        return logits if self._soft_cap == 0.0 else self._ops.cap_logits(logits, self._soft_cap)


def _equal(own: Weight, shared: Weight) -> bool:
    """Whether two plain weights are the same; quantized ones are not compared, as none is tied to a second copy."""
    if isinstance(own, QuantizedWeight) or isinstance(shared, QuantizedWeight):
        return False
    return torch.equal(own, shared)

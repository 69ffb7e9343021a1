"""How a transformers model's attention reaches the OpTable.

transformers looks attention up by name (``AttentionInterface``) and hands the function the calling module, so each
module of a model carries its model's own ``qiao_route``: nothing is global but the two registered names. Of the
registered functions, ``attend`` does nothing but ask the route; ``describe_mask`` turns the mask that a model asks for
into a tag that says which positions it lets through, so that no T x T mask is ever made and a mask that the contract
cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from qiao.contract import AttentionMetadata, KVCache
from qiao.errors import ModelError
from qiao.optable import OpTable

SERVE = "qiao"
"""Attention name while serving: no mask is made, because transformers makes none for a name without a mask function."""

TRACE = "qiao_trace"
"""Attention name while a model is described: masks become tags."""

_FAR = 1 << 20
_CAUSAL, _OTHER = -1, -2


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The constants of one attention call, found by tracing; its position in the forward pass is its cache's index."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int
    soft_cap: float


class Route(Protocol):
    """What a module's attention is sent to: ``query``, ``key``, ``value`` [1, heads, T, D]; returns [1, T, H, D]."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend."""
        ...


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature, sent on to the module's own route."""
    route: Route = module.qiao_route  # type: ignore[assignment]
    return route(module, query, key, value, attention_mask, scaling, options), None


def _allows(mask_function: Callable[..., Any], query: int, key: int) -> bool:
    return bool(torch.as_tensor(mask_function(0, 0, torch.tensor(query), torch.tensor(key))))


def window_of(mask_function: Callable[..., Any], local_size: int | None) -> int:
    """The sliding window that ``mask_function(batch, head, query, key)`` means: 0 for plain causal, -2 for neither.

    Probed at the points where causal, sliding, chunked and bidirectional masks differ.
    """
    if not _allows(mask_function, 3, 3) or _allows(mask_function, 3, 4):
        return _OTHER
    if not local_size:
        return 0 if _allows(mask_function, _FAR, 0) and _allows(mask_function, _FAR + 1, _FAR) else _OTHER
    for query in (local_size, local_size + 1, 2 * local_size):
        inside = _allows(mask_function, query, query - local_size + 1)
        outside = _allows(mask_function, query, query - local_size)
        if outside or not inside:
            return _OTHER
    return int(local_size)


def describe_mask(*args: Any, mask_function: Callable[..., Any] | None = None, **options: Any) -> torch.Tensor:
    """A tag [1, 1, 1, 1] that holds the window of the mask asked for; see ``window_of``."""
    with torch.device("cpu"):
        window = _OTHER if mask_function is None else window_of(mask_function, options.get("local_size"))
        return torch.full((1, 1, 1, 1), float(window or _CAUSAL))


def register() -> None:
    """Tell transformers our names. Doing it again changes nothing."""
    AttentionInterface.register(SERVE, attend)
    AttentionInterface.register(TRACE, attend)
    AttentionMaskInterface.register(TRACE, describe_mask)


def set_route(model: nn.Module, route: Route) -> None:
    """Give every module of ``model`` the route that its attention takes."""
    for module in model.modules():
        object.__setattr__(module, "qiao_route", route)


_HARMLESS = frozenset(
    (
        *("dropout", "sliding_window", "softcap", "is_causal", "position_ids", "position_embeddings", "layer_idx"),
        *("use_cache", "cache", "past_key_values", "cache_position", "return_dict", "token_type_ids"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
    )
)
"""What models pass on to attention that changes nothing about it, or that is recorded."""


class Recorder:
    """Notes each attention call of a trace on the meta device and refuses what the contract cannot say."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.calls: list[AttentionCall] = []

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Record, and answer an empty tensor of the right shape."""
        self._check_tensors(query, key, value)
        for name, value_ in options.items():
            if name not in _HARMLESS and value_ is not None and value_ is not False:
                self._refuse(f"its attention takes `{name}`, which the contract does not have")
        if options.get("is_causal") is False or (
            getattr(module, "is_causal", True) is False and options.get("is_causal") is None
        ):
            self._refuse("its attention is not causal")
        if scaling is not None and not isinstance(scaling, (int, float)):
            self._refuse("its attention scale is not a constant")
        soft_cap = options.get("softcap") or 0.0
        self.calls.append(
            AttentionCall(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                scale=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
                sliding_window=self._window(mask, options),
                soft_cap=float(soft_cap),
            )
        )
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    def _check_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.shape[2] != query.shape[2]:
            self._refuse(
                "its attention reads keys that are not this sequence's own tokens (cross attention or pooling)"
            )
        if query.shape[3] != key.shape[3] or value.shape != key.shape:
            self._refuse(
                f"queries, keys and values have head sizes {query.shape[3]}, {key.shape[3]} and {value.shape[3]} "
                "(latent attention); the cache holds one size"
            )
        if query.shape[1] % key.shape[1]:
            self._refuse(f"{query.shape[1]} query heads do not divide into {key.shape[1]} key heads")

    def _window(self, mask: torch.Tensor | None, options: dict[str, Any]) -> int:
        told = int(options.get("sliding_window") or 0)
        if mask is None:
            return told
        tag = int(mask) if mask.device.type == "cpu" and mask.numel() == 1 else _OTHER
        if tag == _OTHER:
            self._refuse("its attention mask is neither causal nor a sliding window (bias, chunks or blocks)")
        window = max(tag, 0)
        if told and window != told:
            self._refuse(f"its mask has a window of {window} but its attention says {told}")
        return window

    def _refuse(self, reason: str) -> None:
        raise ModelError(
            f"{self.architecture} cannot be served through the generic adapter: {reason}. "
            "It needs a definition of its own in qiao.models."
        )


class PagedRoute:
    """Sends each attention call to the OpTable: writes the step's keys and values, then attends to the paged cache.

    ``begin`` names the step's caches and metadata; ``finish`` checks that each cache was used once.
    """

    def __init__(self, ops: OpTable, calls: tuple[AttentionCall, ...]) -> None:
        self._ops = ops
        self._calls = calls
        self._next = 0
        self._caches: list[KVCache] = []
        self._metadata: AttentionMetadata | None = None

    def begin(self, caches: list[KVCache], metadata: AttentionMetadata) -> None:
        """Start a step."""
        assert len(caches) == len(self._calls), "one cache for each attention call"
        self._caches, self._metadata, self._next = caches, metadata, 0

    def finish(self) -> None:
        """End a step. Raises ``ModelError`` where the model attended more or less often than it did when described."""
        done, self._caches, self._metadata = self._next, [], None
        if done != len(self._calls):
            raise ModelError(f"the model attended {done} times in this step, {len(self._calls)} times when described")

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Write and attend; the constants are those of the trace."""
        metadata, index = self._metadata, self._next
        assert metadata is not None, "begin() was not called"
        call, cache = self._calls[index], self._caches[index]
        self._next = index + 1
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        ops = self._ops
        ops.write_kv(k, v, cache, metadata.slot_mapping)
        run = ops.decode_attention if ops.decode_attention is not None and metadata.decode_only else ops.attention
        return run(q, cache, metadata, call.scale, call.sliding_window, call.soft_cap).unsqueeze(0)


class DenseRoute:
    """Attention in plain torch with keys and values kept in lists: what a loaded model is checked with.

    Rows of ``lengths`` tokens lie packed one after another; each call appends to the rows' keys and values.
    """

    def __init__(self, calls: tuple[AttentionCall, ...], rows: int) -> None:
        self._calls = calls
        self._kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(rows)]
        self.lengths: tuple[int, ...] = ()
        self._next = 0

    def begin(self, lengths: tuple[int, ...]) -> None:
        """Start a pass that adds ``lengths[i]`` tokens to row i."""
        self.lengths, self._next = lengths, 0

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend row by row."""
        index, start, outputs = self._next, 0, []
        self._next += 1
        for row, length in zip(self._kept, self.lengths, strict=True):
            if length == 0:
                continue
            q, k, v = (x[0, :, start : start + length].float() for x in (query, key, value))
            start += length
            if index < len(row):
                k, v = torch.cat((row[index][0], k), 1), torch.cat((row[index][1], v), 1)
                row[index] = (k, v)
            else:
                row.append((k, v))
            outputs.append(dense_attention(q, k, v, self._calls[index]))
        return torch.cat(outputs, dim=1).transpose(0, 1).unsqueeze(0).to(query.dtype)


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Causal attention of ``query`` [H, n, D], the last n of ``key`` and ``value`` [K, m, D]; returns [H, n, D].

    The formula of ``qiao.contract.attention``.
    """
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    scores = query @ key.transpose(1, 2) * call.scale
    if call.soft_cap:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    count, total = query.shape[1], key.shape[1]
    at = torch.arange(total - count, total, device=query.device)[:, None]
    seen = torch.arange(total, device=query.device)[None, :]
    hidden = seen > at
    if call.sliding_window:
        hidden = hidden | (seen <= at - call.sliding_window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value

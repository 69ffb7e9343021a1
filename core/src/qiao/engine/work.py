"""What steps compute and move, estimated from the model's shape (vLLM's ``--enable-mfu-metrics``).

Floating point operations: two for each weight that a token meets, and four for each head dimension of each query head
and each pair of a token and one that it attends to. Bytes read: every weight once a step, as it is packed (see
``qiao.registry.pricing.weight_bytes``; of experts at most those that the tokens can reach), and the cache of each
sequence once a step, within a layer's window. Bytes written: the cache of the new tokens. Left out are activations,
embeddings, norms, LoRA adapters, a draft model, and prompt positions that logits are wanted of.
"""

from __future__ import annotations

from collections.abc import Sequence

from qiao.contract import LinearShape, ModelShape
from qiao.engine.request import WorkStats
from qiao.engine.scheduler import Step


class WorkEstimate:
    """Totals over steps of a model of ``shape``.

    ``sizes`` are the bytes of the weights of each of its linear layers, ``element`` those of a number in the cache.
    """

    def __init__(self, shape: ModelShape, sizes: Sequence[int], element: int) -> None:
        routed = max(1, shape.experts_per_token) * shape.num_layers
        self._token_flops = self._row_flops = 0
        self._bytes: list[tuple[int, LinearShape]] = []
        for line, packed in zip(shape.linears, sizes, strict=True):
            one = 2 * line.in_features * line.out_features
            if line.rows == "T":
                self._token_flops += one * line.count
            elif line.rows == "X":
                self._token_flops += one * routed
            elif line.rows == "N":
                self._row_flops += one * line.count
            if line.rows != "L":
                self._bytes.append((packed, line))
        self._routed = routed
        scale = shape.kv_scale_bytes
        self._attention = [
            (
                4 * a.count * a.num_heads * a.head_dim,
                2 * a.count * a.num_kv_heads * (a.head_dim * element + scale),
                window,
            )
            for a in shape.attention
            for window in (a.sliding_window or shape.max_position,)
        ]
        self._written = shape.kv_bytes_per_token(element)
        self.stats = WorkStats()

    def add(self, step: Step) -> None:
        """Count ``step``, whose sequences have not been advanced yet."""
        stats, rows = self.stats, 0
        spans = [(seq.num_computed, count) for seq, count in zip(step.seqs, step.counts, strict=True)]
        for seq, (start, count) in zip(step.seqs, spans, strict=True):
            if start + count >= len(seq.tokens):
                rows += 1 + len(seq.draft)
        for flops, size, window in self._attention:
            stats.flops += flops * sum(pairs(start, count, window) for start, count in spans)
            stats.read_bytes += size * sum(min(start + count, window + count - 1) for start, count in spans)
        tokens = step.num_tokens
        stats.flops += tokens * self._token_flops + rows * self._row_flops
        stats.read_bytes += sum(self._read(size, line, tokens, rows) for size, line in self._bytes)
        stats.write_bytes += tokens * self._written

    def _read(self, size: int, line: LinearShape, tokens: int, rows: int) -> int:
        if line.rows == "X":
            return size * min(line.count, tokens * self._routed) // line.count
        return size if line.rows == "T" or rows else 0


def pairs(start: int, count: int, window: int) -> int:
    """How many tokens the ``count`` after ``start`` attend to, themselves included, at most ``window`` each."""
    if count == 1:
        return min(start + 1, window)
    growing = min(count, max(0, window - start))
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window

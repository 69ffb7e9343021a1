"""One decoder layer by AWQ: scales of inputs go into what feeds them, then ranges are cut and weights rounded.

What feeds a layer is a norm's weight, the rows of v, the rows of up. Queries and keys keep their ranges: the product of
the two is what matters of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from qiao.models.spec import DecoderSpec
from qiao.quantize import awq
from qiao.quantize.activations import Statistics
from qiao.quantize.grid import Grid, round_to_nearest
from qiao.quantize.options import Options
from qiao.quantize.output import shards_of
from qiao.quantize.result import GRAMS, LayerResult, few
from qiao.quantize.source import Entry, Stack, is_router, join, part

_SAMPLE = 1024
"""Rows of all experts together by which the scale of their common inputs is found."""


class _Folded:
    """A layer's linear weights and biases while scales are moved between them; ``tensors`` are not changed."""

    def __init__(
        self, stacks: Sequence[Stack], tensors: Mapping[str, torch.Tensor], statistics: Mapping[str, Statistics]
    ) -> None:
        self.weights = {stack.name: join(stack.weights, tensors) for stack in stacks}
        self.biases = {stack.name: join(stack.biases, tensors) for stack in stacks if stack.biases}
        self.statistics = dict(statistics)

    def scale_inputs(self, name: str, scale: torch.Tensor) -> None:
        """Multiply the columns of ``name``, whose inputs will come divided by ``scale``."""
        self.weights[name] = self.weights[name] * scale
        if name in self.statistics:
            self.statistics[name] = self.statistics[name].divided(scale)

    def divide_outputs(self, name: str, first: int, scale: torch.Tensor) -> None:
        """Divide the rows of ``name`` from ``first`` on, and their biases."""
        self.weights[name][first : first + scale.numel()] /= scale[:, None]
        if name in self.biases:
            self.biases[name][first : first + scale.numel()] /= scale


class _Layer:
    """Layer ``index`` with what all of its parts need; ``norms`` are entries by ``Decoder``'s name."""

    def __init__(
        self,
        norms: Mapping[str, Entry],
        tensors: Mapping[str, torch.Tensor],
        options: Options,
        grid: Grid,
        spec: DecoderSpec,
        index: int,
    ) -> None:
        self._norms, self._tensors, self._options, self._grid = norms, tensors, options, grid
        self._offset, self._index = spec.norm_offset, index
        self._attention = spec.layers[index].attention
        self.result = LayerResult()

    def fold_norm(self, name: str, scale: torch.Tensor) -> torch.Tensor:
        """Divide a norm by ``scale`` [E]; returns by what it was divided in truth."""
        entry = self._norms[f"model.layers.{self._index}.{name}.weight"]
        divided, exact = divide_norm(self._tensors[entry.name], scale, self._offset, self._grid.dtype)
        self.result.changed[entry.name] = divided
        return exact

    def search(self, folded: _Folded, name: str, tie: int = 1, groups: int = 1) -> torch.Tensor:
        """The scale for the inputs of ``name``; ``tie`` heads in a row, in each of ``groups``, share theirs."""
        statistics = folded.statistics[name]
        heads = statistics.absolute.view(groups, tie, -1)
        magnitude = heads.mean(1, keepdim=True).expand_as(heads).flatten()
        return awq.search_scale(folded.weights[name], statistics.gram, magnitude, self._options.group, self._grid)

    def fold_rows(self, folded: _Folded, source: str, first: int, into: str, tie: int = 1, groups: int = 1) -> None:
        """The rows of ``source`` from ``first`` on take the scale of the inputs of ``into``."""
        scale = self.search(folded, into, tie, groups)
        folded.scale_inputs(into, scale)
        folded.divide_outputs(source, first, scale.view(groups, tie, -1)[:, 0].flatten())

    def attention(self, folded: _Folded, stacks: Sequence[Stack]) -> None:
        """q, k and v, and the output, whose heads that read one v share a scale; rounded."""
        shape, (qkv, out) = self._attention, stacks
        kept = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        folded.scale_inputs(qkv.name, self.fold_norm("input_layernorm", self.search(folded, qkv.name)))
        self.fold_rows(folded, qkv.name, kept, out.name, shape.num_heads // shape.num_kv_heads, shape.num_kv_heads)
        self.round(folded, qkv, kept)
        self.round(folded, out)

    def feed_forward(self, folded: _Folded, gate_up: str, down: str) -> None:
        """The inputs of ``down`` are gate times up, so the rows of up take its scale."""
        self.fold_rows(folded, gate_up, folded.weights[gate_up].shape[0] // 2, down)

    def round(self, folded: _Folded, stack: Stack, kept: int = 0) -> None:
        """Cut the ranges of a stack, but those of its first ``kept`` rows, and round it."""
        weight, gram = folded.weights[stack.name], folded.statistics[stack.name].gram
        shaped = awq.clip(weight, gram, self._options.group, self._grid)
        shaped[:kept] = weight[:kept]
        rounded = round_to_nearest(weight, self._options.group, self._grid, shaped)
        self.result.take(stack, weight, rounded, gram)
        self._keep_biases(folded, stack)

    def nearest(self, folded: _Folded, stack: Stack) -> None:
        """Round a stack of an expert that too few tokens visited."""
        heard = folded.statistics.get(stack.name)
        self.result.nearest(stack, folded.weights[stack.name], heard, self._options, self._grid)
        self._keep_biases(folded, stack)

    def _keep_biases(self, folded: _Folded, stack: Stack) -> None:
        if stack.biases:
            self.result.changed.update(part(stack.biases, folded.biases[stack.name]))


def by_awq(
    stacks: list[Stack],
    norms: Mapping[str, Entry],
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    grid: Grid,
    statistics: Mapping[str, Statistics],
    spec: DecoderSpec,
    index: int,
) -> LayerResult:
    """A layer without experts. ``norms`` are entries by ``Decoder``'s name."""
    made, folded = _Layer(norms, tensors, options, grid, spec, index), _Folded(stacks, tensors, statistics)
    gate_up, down = stacks[2:]
    made.attention(folded, stacks[:2])
    scale = made.search(folded, gate_up.name)
    folded.scale_inputs(gate_up.name, made.fold_norm("pre_mlp_layernorm", scale))
    made.feed_forward(folded, gate_up.name, down.name)
    made.round(folded, gate_up)
    made.round(folded, down)
    return made.result


def experts_by_awq(
    stacks: list[Stack],
    norms: Mapping[str, Entry],
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    grid: Grid,
    listen: Callable[[Sequence[str]], Mapping[str, Statistics]],
    spec: DecoderSpec,
    index: int,
) -> LayerResult:
    """A mixture of experts. Their common inputs, the router's among them, have one scale, found from all tokens.

    Each expert's inner scale and ranges follow from its own tokens. Statistics are gathered for so many experts at once
    as ``GRAMS`` allows; see ``by_awq`` for the rest.
    """
    router = next(name for name in norms if is_router(name)).removesuffix(".weight")
    heard = listen([*(stack.name for stack in stacks[:2]), router])
    made = _Layer(norms, tensors, options, grid, spec, index)
    made.attention(_Folded(stacks[:2], tensors, heard), stacks[:2])
    pairs = list(zip(stacks[2::2], stacks[3::2], strict=True))
    rows = sum(entry.shape[0] for gate_up, _ in pairs for entry in gate_up.weights)
    step = max(1, rows // _SAMPLE)
    sample = torch.cat([join(gate_up.weights, tensors)[::step] for gate_up, _ in pairs])
    inputs = heard[router]
    exact = made.fold_norm(
        "pre_mlp_layernorm", awq.search_scale(sample, inputs.gram, inputs.absolute, options.group, grid)
    )
    for entry in (entry for name, entry in norms.items() if is_router(name)):
        made.result.changed[entry.name] = tensors[entry.name] * exact
    sizes = [4 * sum(stack.weights[0].shape[1] ** 2 for stack in pair) for pair in pairs]
    for chosen in shards_of(sizes, GRAMS):
        together = [stack for i in chosen for stack in pairs[i]]
        folded = _Folded(together, tensors, listen([stack.name for stack in together]))
        for i in chosen:
            _expert(made, folded, *pairs[i], exact)
    return made.result


def _expert(made: _Layer, folded: _Folded, gate_up: Stack, down: Stack, scale: torch.Tensor) -> None:
    """One expert, whose inputs come divided by ``scale``."""
    folded.scale_inputs(gate_up.name, scale)
    poor = {s.name: few(s.name, folded.statistics.get(s.name), s.weights[0].shape[1]) for s in (gate_up, down)}
    if not poor[down.name]:
        made.feed_forward(folded, gate_up.name, down.name)
    for stack in (gate_up, down):
        (made.nearest if poor[stack.name] else made.round)(folded, stack)


def divide_norm(
    weight: torch.Tensor, scale: torch.Tensor, offset: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's ``weight`` [E] divided by ``scale`` as ``dtype`` can hold it, and by what it was divided in truth.

    ``offset``: the norm multiplies by 1 + weight. Channels that would vanish stay as they are.
    """
    whole = weight + 1.0 if offset else weight
    divided = (whole / scale - 1.0 if offset else whole / scale).to(dtype).float()
    after = divided + 1.0 if offset else divided
    exact = whole / after
    good = torch.isfinite(exact) & (exact > 0.0)
    return torch.where(good, divided, weight), torch.where(good, exact, torch.ones_like(exact))

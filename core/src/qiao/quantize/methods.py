"""One decoder layer from floating point to rounded weights, by each of the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from qiao.errors import ModelError
from qiao.models.decoder import DecoderLayer
from qiao.models.spec import DecoderSpec
from qiao.quantize import awq
from qiao.quantize.activations import Layers, Statistics
from qiao.quantize.gptq import gptq
from qiao.quantize.grid import Grid, Rounded, error_of, round_to_nearest
from qiao.quantize.options import Options
from qiao.quantize.source import Entry, Stack, join, part


@dataclass
class LayerResult:
    """``rounded`` weights by the checkpoint's names, ``changed`` other tensors likewise (float32), and ``errors``: for
    each linear layer of ``Decoder`` the squared error of its outputs over the squared outputs (of weights for rtn)."""

    rounded: dict[str, Rounded] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def take(self, stack: Stack, weight: torch.Tensor, rounded: Rounded, gram: torch.Tensor | None) -> None:
        """Keep the result of ``stack``, whose weight was ``weight`` [O, I]."""
        first = 0
        for entry in stack.weights:
            rows = rounded.rows(first, entry.shape[0])
            self.rounded[entry.name] = Rounded(
                entry.back(rows.codes), entry.back(rows.scale), entry.back(rows.zero), rows.group
            )
            first += entry.shape[0]
        self.errors[stack.name] = error_of(weight, rounded.values(), gram)


def by_rtn(stacks: list[Stack], tensors: Mapping[str, torch.Tensor], options: Options, grid: Grid) -> LayerResult:
    """Each weight to the nearest number of its group's grid."""
    result = LayerResult()
    for stack in stacks:
        weight = join(stack.weights, tensors)
        result.take(stack, weight, round_to_nearest(weight, options.group, grid), None)
    return result


def by_gptq(
    stacks: list[Stack],
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    grid: Grid,
    listen: Callable[[str], Statistics],
    layer: DecoderLayer,
) -> LayerResult:
    """Linear layers in the order in which they run, each with the inputs that the rounded ones before it lead to.

    ``layer`` is left with the rounded weights. Raises ``ModelError`` by name where the calibration data do not suffice.
    """
    result = LayerResult()
    for stack in stacks:
        weight, gram = join(stack.weights, tensors), listen(stack.name).gram
        try:
            rounded = gptq(weight, gram, options.group, grid, act_order=options.act_order, damp=options.damp)
        except ValueError as error:
            raise ModelError(
                f"{stack.name}: {error}; raise --damp (it is {options.damp}) or give more calibration data"
            ) from error
        result.take(stack, weight, rounded, gram)
        put(layer, stack.weights, result.rounded)
    return result


def put(layer: DecoderLayer, entries: tuple[Entry, ...] | list[Entry], rounded: Mapping[str, Rounded]) -> None:
    """Give ``layer`` the values that ``rounded`` weights stand for."""
    targets = layer.targets()
    for entry in entries:
        if entry.name in rounded:
            targets[entry.inner].put(entry.into(rounded[entry.name].values()))


class _Folded:
    """A layer's linear weights and biases while scales are moved between them; ``tensors`` are not changed."""

    def __init__(
        self, stacks: list[Stack], tensors: Mapping[str, torch.Tensor], statistics: Mapping[str, Statistics]
    ) -> None:
        self.weights = {stack.name: join(stack.weights, tensors) for stack in stacks}
        self.biases = {stack.name: join(stack.biases, tensors) for stack in stacks if stack.biases}
        self.statistics = dict(statistics)

    def scale_inputs(self, name: str, scale: torch.Tensor) -> None:
        """Multiply the columns of ``name``, whose inputs will come divided by ``scale``."""
        self.weights[name] = self.weights[name] * scale
        self.statistics[name] = self.statistics[name].divided(scale)

    def divide_outputs(self, name: str, first: int, scale: torch.Tensor) -> None:
        """Divide the rows of ``name`` from ``first`` on, and their biases."""
        self.weights[name][first : first + scale.numel()] /= scale[:, None]
        if name in self.biases:
            self.biases[name][first : first + scale.numel()] /= scale


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
    """Scales of inputs go into what feeds them (a norm's weight, the rows of v, the rows of up), then ranges are cut.

    ``norms`` are entries by ``Decoder``'s name. Queries and keys keep their ranges: the product of the two is what
    matters of them.
    """
    folded, result = _Folded(stacks, tensors, statistics), LayerResult()
    qkv, out, gate_up, down = (stack.name for stack in stacks)
    attention = spec.layers[index].attention
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def fold_norm(name: str, into: str) -> None:
        entry = norms[f"model.layers.{index}.{name}.weight"]
        scale = _search(folded, into, options, grid)
        result.changed[entry.name], exact = divide_norm(tensors[entry.name], scale, spec.norm_offset, grid.dtype)
        folded.scale_inputs(into, exact)

    def fold_rows(source: str, first: int, into: str, tie: int, groups: int) -> None:
        scale = _search(folded, into, options, grid, tie, groups)
        folded.scale_inputs(into, scale)
        one = scale.view(groups, tie, -1)[:, 0].flatten()
        folded.divide_outputs(source, first, one)

    fold_norm("input_layernorm", qkv)
    fold_rows(qkv, (heads + kv_heads) * size, out, heads // kv_heads, kv_heads)
    fold_norm("pre_mlp_layernorm", gate_up)
    fold_rows(gate_up, folded.weights[gate_up].shape[0] // 2, down, 1, 1)
    for stack in stacks:
        weight, gram = folded.weights[stack.name], folded.statistics[stack.name].gram
        shaped = awq.clip(weight, gram, options.group, grid)
        if stack.name == qkv:
            kept = (heads + kv_heads) * size
            shaped[:kept] = weight[:kept]
        result.take(stack, weight, round_to_nearest(weight, options.group, grid, shaped), gram)
        if stack.biases:
            result.changed.update(part(stack.biases, folded.biases[stack.name]))
    return result


def _search(folded: _Folded, name: str, options: Options, grid: Grid, tie: int = 1, groups: int = 1) -> torch.Tensor:
    """The scale for the inputs of ``name``; ``tie`` heads in a row, in each of ``groups``, share theirs."""
    statistics = folded.statistics[name]
    heads = statistics.absolute.view(groups, tie, -1)
    magnitude = heads.mean(1, keepdim=True).expand_as(heads).flatten()
    return awq.search_scale(folded.weights[name], statistics.gram, magnitude, options.group, grid)


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


def quantize_layer(
    index: int,
    stacks: list[Stack],
    entries: list[Entry],
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    grid: Grid,
    layers: Layers,
    layer: DecoderLayer,
    hidden: list[torch.Tensor],
    spec: DecoderSpec,
) -> LayerResult:
    """Layer ``index`` by the method of ``options``; ``hidden`` moves on to the next layer where it is calibrated."""
    if options.method == "rtn":
        return by_rtn(stacks, tensors, options, grid)
    if options.method == "gptq":

        def listen(name: str) -> Statistics:
            return layers.listen(index, layer, hidden, [name])[name]

        result = by_gptq(stacks, tensors, options, grid, listen, layer)
        layers.run(index, layer, hidden)
        return result
    statistics = layers.listen(index, layer, hidden, [stack.name for stack in stacks])
    layers.run(index, layer, hidden)
    norms = {entry.inner: entry for entry in entries}
    return by_awq(stacks, norms, tensors, options, grid, statistics, spec, index)

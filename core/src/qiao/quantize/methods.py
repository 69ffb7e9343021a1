"""One decoder layer from floating point to rounded weights, by each of the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from qiao.errors import ModelError
from qiao.layers.mlp import MlpSpec
from qiao.models.decoder import DecoderLayer
from qiao.models.spec import DecoderSpec
from qiao.quantize.activations import Layers, Statistics
from qiao.quantize.gptq import gptq
from qiao.quantize.grid import Grid, Rounded, round_to_nearest
from qiao.quantize.options import Options
from qiao.quantize.result import LayerResult, few, stages
from qiao.quantize.scaled import by_awq, experts_by_awq
from qiao.quantize.source import Entry, Stack, join


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
    listen: Callable[[Sequence[str]], Mapping[str, Statistics]],
    layer: DecoderLayer,
) -> LayerResult:
    """Linear layers in the order in which they run, each with the inputs that the rounded ones before it lead to.

    The same layer of all experts is heard at once. ``layer`` is left with the rounded weights. Raises ``ModelError`` by
    name where the calibration data do not suffice.
    """
    result = LayerResult()
    for together in stages(stacks):
        statistics = listen([stack.name for stack in together])
        for stack in together:
            weight, heard = join(stack.weights, tensors), statistics.get(stack.name)
            if few(stack.name, heard, weight.shape[1]):
                result.nearest(stack, weight, heard, options, grid)
                continue
            assert heard is not None
            try:
                rounded = gptq(weight, heard.gram, options.group, grid, act_order=options.act_order, damp=options.damp)
            except ValueError as error:
                raise ModelError(
                    f"{stack.name}: {error}; raise --damp (it is {options.damp}) or give more calibration data"
                ) from error
            result.take(stack, weight, rounded, heard.gram)
        for stack in together:
            put(layer, stack.weights, result.rounded)
    return result


def put(layer: DecoderLayer, entries: tuple[Entry, ...] | list[Entry], rounded: Mapping[str, Rounded]) -> None:
    """Give ``layer`` the values that ``rounded`` weights stand for."""
    targets = layer.targets()
    for entry in entries:
        if entry.name in rounded:
            targets[entry.inner].put(entry.into(rounded[entry.name].values()))


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
        result = by_gptq(stacks, tensors, options, grid, partial(layers.listen, index, layer, hidden), layer)
        layers.run(index, layer, hidden)
        return result
    norms = {entry.inner: entry for entry in entries}
    listen = partial(layers.listen, index, layer, hidden)
    if isinstance(spec.layers[index].mlp, MlpSpec):
        statistics = listen([stack.name for stack in stacks])
        result = by_awq(stacks, norms, tensors, options, grid, statistics, spec, index)
    else:
        result = experts_by_awq(stacks, norms, tensors, options, grid, listen, spec, index)
    layers.run(index, layer, hidden)
    return result

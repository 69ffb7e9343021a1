"""A whole run: layer by layer from a checkpoint to a folder, resumable after any of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.loading import ModelFiles, WeightStore, load_tokenizer, read_raw_config
from qiao.models import read_spec
from qiao.models.decoder import DecoderLayer
from qiao.optable import OpTable
from qiao.quantization import method_of
from qiao.quantization.weight import QuantizedWeight
from qiao.quantize.activations import Layers, linear_names
from qiao.quantize.calibration import digest
from qiao.quantize.formats import check_shape, write_weight
from qiao.quantize.grid import Grid
from qiao.quantize.methods import quantize_layer
from qiao.quantize.options import Options
from qiao.quantize.output import Output, shards_of
from qiao.quantize.result import LayerResult
from qiao.quantize.source import Source, is_router

logger = logging.getLogger(__name__)

_SHARD = 1 << 28
"""Bytes of embeddings, head and final norm that are put together into one shard, and so held at once."""

Progress = Callable[[int, int, float | None], None]
"""Takes the number of finished layers, of all, and the last one's error."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where calibration runs: the bound operators, the dtype of activations, tokens in a block of the KV cache."""

    ops: OpTable
    dtype: torch.dtype
    block_size: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    ``errors``: for each layer the squared error of its linear layers' outputs over the squared outputs (of weights for
    rtn), and that of each of them. Bytes are of the layers' linear weights; ``resumed`` counts layers that were there
    already; ``tokens`` of calibration data. ``to_nearest``: linear layers of experts that too few tokens visited, and
    how many did.
    """

    output: str
    method: str
    resumed: int
    errors: list[dict[str, Any]]
    mean_error: float
    tokens: int
    bytes_before: int
    bytes_after: int
    seconds: float
    to_nearest: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def quantize(
    files: ModelFiles,
    folder: Path,
    options: Options,
    device: Device,
    sequences: Sequence[Sequence[int]] = (),
    progress: Progress = lambda done, total, error: None,
) -> Report:
    """Quantize the linear layers of a model into ``folder``; embeddings and head keep 16 bits.

    ``sequences`` are the calibration data as tokens, which rtn does without. Held at a time: one layer in float32 with
    what its method needs, and the hidden states of all tokens. Raises ``ModelError`` for what cannot be quantized,
    before anything is written, and ``ParameterError`` where ``folder`` holds something else.
    """
    with torch.inference_mode():
        return _Run(files, folder, options, device, sequences).run(progress)


class _Run:
    def __init__(
        self, files: ModelFiles, folder: Path, options: Options, device: Device, sequences: Sequence[Sequence[int]]
    ) -> None:
        self._files, self._folder, self._options, self._sequences = files, folder, options, sequences
        self._config = read_raw_config(files)
        self._spec = read_spec(self._config)
        if files.gguf is not None:
            load_tokenizer(files)  # it is written at the end; one that cannot be read is refused now
        store = WeightStore(files)
        self._source = Source(store, self._spec)
        self._dtype = stored_dtype(self._config)
        self._grid = Grid(options.bits, options.sym, self._dtype)
        for entry in (entry for layer in self._source.layers for entry in layer if entry.linear):
            check_shape(entry.name, entry.shape, options)
        rest = [math.prod(entry.shape) * self._dtype.itemsize for entry in self._source.rest]
        self._rest = shards_of(rest, _SHARD)
        asked = options.as_dict() | {"model": store.fingerprint(), "dtype": str(self._dtype).removeprefix("torch.")}
        if options.calibrated:
            _check_tokens(sequences, self._spec.vocab_size)
            asked["calibration"] = digest(sequences)
        self._output = Output(folder, asked, len(self._spec.layers) + len(self._rest))
        length = max((len(ids) for ids in sequences), default=1)
        self._layers = Layers(self._spec, device.ops, device.dtype, device.block_size, length)

    def run(self, progress: Progress) -> Report:
        start, resumed, total = time.monotonic(), len(self._output.done), len(self._spec.layers)
        progress(resumed, total, None)
        hidden: list[torch.Tensor] = []
        if self._options.calibrated and resumed < total:
            hidden = self._layers.embed(self._source.embedding(self._dtype), self._sequences)
            for index in range(resumed):
                self._pass(index, hidden)
        for index in range(resumed, total):
            error = self._layer(index, hidden)
            progress(index + 1, total, error)
        hidden.clear()
        for i, entries in enumerate(self._rest):
            held = [self._source.rest[e] for e in entries]
            self._output.write_shard(
                total + i, {e.name: self._source.read(e, self._dtype).to(self._dtype) for e in held}
            )
        self._output.finish(self._files, self._final_config())
        return self._report(resumed, time.monotonic() - start)

    def _make(self, index: int, tensors: Mapping[str, torch.Tensor]) -> DecoderLayer:
        return self._layers.make(index, self._source.inner(index, tensors))

    def _pass(self, index: int, hidden: list[torch.Tensor]) -> None:
        """Take ``hidden`` through a finished layer: with its rounded weights for gptq, as it was for awq."""
        tensors = self._source.layer(index, self._dtype)
        if self._options.method == "gptq":
            method, held = method_of(self._options.quantization_config()), self._output.read_layer(index)
            for entry in (entry for entry in self._source.layers[index] if entry.linear):
                module = entry.name.removesuffix(".weight")
                parts = {name: held[f"{module}.{name}"] for name in method.parts if f"{module}.{name}" in held}
                weight = method.weight(module, parts)
                assert isinstance(weight, QuantizedWeight)
                tensors[entry.name] = weight.dequantize()
        self._layers.run(index, self._make(index, tensors), hidden)

    def _layer(self, index: int, hidden: list[torch.Tensor]) -> float:
        """Quantize one layer and write it; returns its error."""
        source, entries = self._source, self._source.layers[index]
        tensors = source.layer(index, self._dtype)
        layer = self._make(index, tensors)
        stacks = source.linears(index, linear_names(layer))
        result = quantize_layer(
            index, stacks, entries, tensors, self._options, self._grid, self._layers, layer, hidden, self._spec
        )
        written = self._written(tensors, result)
        error = sum(result.errors.values()) / len(result.errors)
        before = sum(math.prod(entry.shape) * self._dtype.itemsize for stack in stacks for entry in stack.weights)
        named = tuple(f"{entry.name.removesuffix('.weight')}." for stack in stacks for entry in stack.weights)
        after = sum(x.nbytes for name, x in written.items() if name.startswith(named) and not name.endswith(".bias"))
        record = {"error": error, "linears": result.errors, "bytes_before": before, "bytes_after": after}
        self._output.write_layer(written, record | {"to_nearest": result.to_nearest})
        if result.to_nearest:
            logger.warning(
                "layer %d: %d linear layers of experts saw fewer tokens than they have inputs and were rounded to "
                "nearest: %s",
                index,
                len(result.to_nearest),
                ", ".join(f"{name} ({count})" for name, count in result.to_nearest.items()),
            )
        return error

    def _written(self, tensors: Mapping[str, torch.Tensor], result: LayerResult) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name in result.rounded:
                parts = write_weight(result.rounded[name], self._options, self._dtype)
                found.update({f"{name.removesuffix('.weight')}.{part}": x for part, x in parts.items()})
            else:
                found[name] = result.changed.get(name, tensor).to(self._dtype)
        return found

    def _final_config(self) -> dict[str, Any]:
        config = dict(self._config)
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        routers = [entry.name for layer in self._source.layers for entry in layer if is_router(entry.inner)]
        config["quantization_config"] = self._options.quantization_config(
            [name.removesuffix(".weight") for name in routers]
        )
        return config

    def _report(self, resumed: int, seconds: float) -> Report:
        done = self._output.done
        errors = [{"layer": i, "error": r["error"], "linears": r["linears"]} for i, r in enumerate(done)]
        return Report(
            output=str(self._folder),
            method=self._options.method,
            resumed=resumed,
            errors=errors,
            mean_error=sum(record["error"] for record in done) / len(done),
            tokens=sum(len(ids) for ids in self._sequences) if self._options.calibrated else 0,
            bytes_before=sum(record["bytes_before"] for record in done),
            bytes_after=sum(record["bytes_after"] for record in done),
            seconds=seconds,
            to_nearest={name: count for record in done for name, count in record["to_nearest"].items()},
        )


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of scales and of all that is not quantized: the config's own where it has 16 bits, else bfloat16."""
    inner = config.get("text_config") or {}
    name = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return torch.float16 if str(name).removeprefix("torch.") == "float16" else torch.bfloat16


def _check_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
    if not sequences:
        raise ModelError("there are no calibration data; only --method rtn does without")
    worst = max(max(ids) for ids in sequences)
    if worst >= vocab_size:
        raise ModelError(
            f"the tokenizer gave the token {worst}, and the model knows {vocab_size}; they do not belong together"
        )

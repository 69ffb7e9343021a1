"""One iterator over a model's tensors, whatever the file format."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TypeVar

import torch

from qiao.errors import ModelError
from qiao.loading.config import read_raw_config
from qiao.loading.quantized import OWN_FILES, iter_quantized, promised_weights, read_settings
from qiao.loading.safetensors import checkpoint_files, count_tensors, iter_safetensors
from qiao.loading.sources import ModelFiles
from qiao.quantization import Method, QuantizedWeight, Weight, method_of

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Between two lines of a load that is not shown on a terminal."""

T = TypeVar("T")


def iter_weights(
    files: ModelFiles, device: str = "cpu", progress: bool = True, dequantize: bool | AbstractSet[str] = False
) -> Iterator[tuple[str, Weight]]:
    """Each weight once, under its Hugging Face name, on ``device``.

    Only one at a time is held here. Floating point keeps its dtype. Quantized weights stay so where the contract has
    their form; the others, and with ``dequantize`` all or those of the schemes named, become float32. ``progress``
    shows a bar on a terminal, and logs how far it is elsewhere.
    Raises ``ModelError`` naming the file or the tensor, also for NaN.
    """
    if files.gguf is not None:
        from qiao.loading.gguf import count_gguf, iter_gguf

        total = count_gguf(files.header)
        source = iter_gguf(files.header, device, dequantize is True)
    else:
        total = count_tensors(files.folder)
        method = _method(files)
        source = iter_quantized(files.folder, device, method) if method else iter_safetensors(files.folder, device)
    source = _plain(source, dequantize) if dequantize else source
    found = _checked(source, files)
    if not progress:
        return found
    return _with_progress(found, total) if sys.stderr.isatty() else with_log(found, total)


def weight_files(files: ModelFiles) -> list[Path]:
    """The files that decide what ``iter_weights`` yields, but for ``config.json``."""
    if files.gguf is not None:
        return sorted({tensor.file for tensor in files.header.tensors.values()})
    own = [files.folder / name for name in OWN_FILES]
    return [*checkpoint_files(files.folder), *(file for file in own if file.is_file())]


def quantization_of(files: ModelFiles) -> str | None:
    """The method by which a model is quantized, by its usual name (``gguf``, ``gptq``), None where it is not."""
    if files.gguf is not None:
        return "gguf"
    method = _method(files)
    return method.name if method else None


def quantized_weights(files: ModelFiles) -> dict[str, QuantizedWeight]:
    """What ``iter_weights`` will yield quantized, by name, on the meta device: only headers are read.

    Raises ``ModelError`` for a method that cannot be loaded.
    """
    if files.gguf is not None:
        from qiao.loading.gguf import quantized_gguf

        return quantized_gguf(files.header)
    method = _method(files)
    return promised_weights(files.folder, method) if method else {}


def _method(files: ModelFiles) -> Method | None:
    if not (files.folder / "config.json").is_file():
        return None
    settings = read_settings(files.folder, read_raw_config(files))
    return method_of(settings) if settings else None


def _plain(source: Iterator[tuple[str, Weight]], schemes: bool | AbstractSet[str]) -> Iterator[tuple[str, Weight]]:
    for name, weight in source:
        if isinstance(weight, QuantizedWeight) and (schemes is True or weight.form.scheme in (schemes or ())):
            weight = weight.dequantize()
        yield name, weight


def _checked(source: Iterator[tuple[str, Weight]], files: ModelFiles) -> Iterator[tuple[str, Weight]]:
    for name, weight in source:
        held = weight.tensors.values() if isinstance(weight, QuantizedWeight) else (weight,)
        if any(has_nan(tensor) for tensor in held):
            raise ModelError(f"{files.gguf or files.folder}: {name} holds NaN. The file is damaged or badly quantized.")
        if isinstance(weight, QuantizedWeight) and not bool(weight.tensors["scale"].isfinite().all()):
            raise ModelError(f"{files.gguf or files.folder}: {name} has an infinite scale. The file is damaged.")
        yield name, weight


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether a float tensor holds NaN; mostly one pass, as a sum is NaN only with NaN or infinities of both signs."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return False
    return math.isnan(tensor.sum(dtype=torch.float32).item()) and bool(torch.isnan(tensor).any())


def with_log(source: Iterator[T], total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """``source``, with a line in the log every ``LOG_SECONDS``: a large model must not look as if it hung."""
    said = clock()
    for count, item in enumerate(source):
        if clock() - said >= LOG_SECONDS:
            said = clock()
            logger.info("loading weights: %d of %d tensors", count, total)
        yield item


def _with_progress(source: Iterator[Any], total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    yield from track(source, "Loading weights", total=total, console=Console(stderr=True), transient=True)

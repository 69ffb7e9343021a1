"""One iterator over a model's tensors, whatever the file format."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.loading.safetensors import count_tensors, iter_safetensors
from qiao.loading.sources import ModelFiles


def iter_weights(files: ModelFiles, device: str = "cpu", progress: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor once, under its Hugging Face name, on ``device``.

    Only one tensor at a time is held here. Safetensors keep their dtype; GGUF tensors arrive dequantized, as float32
    where they were quantized. ``progress`` shows a bar on a terminal. Raises ``ModelError`` naming the file or the
    tensor, also for NaN.
    """
    if files.gguf is not None:
        from qiao.loading.gguf import count_gguf, iter_gguf

        total = count_gguf(files.gguf)
        source = iter_gguf(files.gguf, device)
    else:
        total = count_tensors(files.folder)
        source = iter_safetensors(files.folder, device)
    return (
        _with_progress(_checked(source, files), total) if progress and sys.stderr.isatty() else _checked(source, files)
    )


def _checked(source: Iterator[tuple[str, torch.Tensor]], files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source:
        if has_nan(tensor):
            raise ModelError(f"{files.gguf or files.folder}: {name} holds NaN. The file is damaged or badly quantized.")
        yield name, tensor


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether a float tensor holds NaN; mostly one pass, as a sum is NaN only with NaN or infinities of both signs."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return False
    return math.isnan(tensor.sum(dtype=torch.float32).item()) and bool(torch.isnan(tensor).any())


def _with_progress(source: Iterator[Any], total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    yield from track(source, "Loading weights", total=total, console=Console(stderr=True), transient=True)

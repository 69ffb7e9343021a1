"""The base's logits on disk, while the candidate is not loaded yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from qiao.errors import UsageError

_KEPT_FREE = 256 << 20
"""Bytes of the disk that are left alone."""


class LogitStore:
    """Float32 rows [V] appended to one file of ``folder`` and read back in slices.

    Full rows in float32: rounding them to float16 is by itself a KL of about 1e-6 a token (normal logits with a
    deviation of 3 to 5 over 49,152 entries: 0.3 to 6e-6), as much as two right plugins may differ by.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._file = folder / "base-logits.f32"
        self._vocab_size = vocab_size
        self._rows = 0

    def reserve(self, rows: int) -> None:
        """Refuse now what the disk cannot hold. Raises ``UsageError`` with the sizes."""
        needed, free = rows * self._vocab_size * 4, shutil.disk_usage(self._file.parent).free
        if needed + _KEPT_FREE > free:
            raise UsageError(
                f"the base's distributions take {needed / 1e9:.1f} GB of {self._file.parent}, which has "
                f"{free / 1e9:.1f} GB free; name another folder with --scratch, or take a smaller suite or --max-tokens"
            )

    def append(self, rows: torch.Tensor) -> None:
        """Write float32 ``rows`` [n, V], which lie on the host."""
        with self._file.open("ab") as stream:
            rows.float().contiguous().numpy().tofile(stream)
        self._rows += len(rows)

    def __len__(self) -> int:
        return self._rows

    def read(self, start: int, count: int) -> torch.Tensor:
        """A copy of rows ``start`` to ``start + count`` [count, V]."""
        offset = start * self._vocab_size * 4
        shape = (count, self._vocab_size)
        mapped = np.memmap(self._file, dtype=np.float32, mode="r", offset=offset, shape=shape)
        return torch.from_numpy(np.array(mapped))

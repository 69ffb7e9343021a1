"""Random numbers that depend on a sequence's seed and position only, never on the batch.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 17) used as a counter-based hash.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(z: UInt64) -> UInt64:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    z ^= z >> np.uint64(31)
    return z


def uniforms(seeds: UInt64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each (seed, position); seeds [N] uint64, positions [N] int64, result [N] float32.

    The seed is hashed first, so that seeds that differ by one (the sequences of n > 1) give unrelated streams.
    """
    start = _mix(seeds + _GOLDEN)
    bits = _mix(start + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    high: npt.NDArray[np.float32] = (bits >> np.uint64(40)).astype(np.float32)
    high *= np.float32(2.0**-24)
    return high

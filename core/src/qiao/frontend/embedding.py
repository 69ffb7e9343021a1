"""From the engine's pooled vectors to embeddings and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qiao.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]


def vector_of(pooled: bytes | None, dimensions: int | None, normalize: bool) -> Vector:
    """The engine's vector ``pooled`` [E], or its first ``dimensions`` numbers, as Matryoshka embeddings allow.

    ``normalize`` makes its length one. Raises ``ParameterError`` where there are fewer numbers.
    """
    import numpy as np  # late: a server that only writes text does without

    assert pooled is not None, "the request asked for no vector"
    vector = np.frombuffer(pooled, "<f4").astype(np.float64)
    if dimensions is not None:
        if dimensions > len(vector):
            raise ParameterError("dimensions", f"at most {len(vector)} with this model, got {dimensions}")
        vector = vector[:dimensions]
    if normalize:
        length = np.sqrt(np.dot(vector, vector))
        vector = vector / length if length > 0 else vector
    return vector.astype(np.float32)


def similarity(a: Vector, b: Vector) -> float:
    """The cosine of the angle between two vectors [E], 0 where one of them is zero."""
    import numpy as np

    first, second = a.astype(np.float64), b.astype(np.float64)
    lengths = np.sqrt(np.dot(first, first) * np.dot(second, second))
    return float(np.dot(first, second) / lengths) if lengths > 0 else 0.0

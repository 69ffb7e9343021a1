"""``capture`` by torch's CUDA graphs, which on HIP are HIP graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


class Replay:
    """A recorded graph; calling it launches it and returns the tensors of the recording, filled anew."""

    def __init__(self, graph: Any, outputs: Any) -> None:
        self._graph, self._outputs = graph, outputs

    def __call__(self) -> Any:
        """Without a wait: whoever reads the tensors waits by the stream's order."""
        self._graph.replay()
        return self._outputs


@lru_cache(maxsize=64)
def _pool(device: str, buffers: int) -> Any:
    """One memory pool for all graphs over the same buffers, which by the contract may share their working memory."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


def record(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """See ``DeviceSpec.capture``. The function runs twice before, so that kernels are compiled and libraries set up.

    What it raises there comes out as it is. Whatever a stream that is recording refuses, such as a value read on the
    host, becomes ``NotImplementedError`` with the driver's words.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function(*example)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = _pool(device, example[0].untyped_storage().data_ptr() if example else 0)
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = function(*example)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise NotImplementedError(f"a graph cannot record it: {reason}") from error
    return Replay(graph, outputs)

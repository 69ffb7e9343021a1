"""Recorded decode steps: NPU graphs.

Attention takes the lengths of keys as lists of the host, so a recorded call would keep those of its recording.
torch_npu makes each such call a task group of the graph and puts new lists into it before a replay
(``NPUGraph.update``). Where the lists come from is noted while recording: a replay reads that tensor, one small copy
from the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from qiao.contract import AttentionMetadata, UnreadLengths, hookimpl

from qiao_ascend import _sdk
from qiao_ascend.chips import profile_of

BLOCKING = "ASCEND_LAUNCH_BLOCKING"
"""A variable under which torch_npu records no graphs."""

UPDATED = "actual_seq_lengths_kv"
"""The argument of ``npu_fused_infer_attention_score`` that a replay gives anew."""


class Recording:
    """A region being recorded; ``lengths`` are the tensors behind its attention calls, in their order.

    ``warm`` while the region runs as it is before, and may still read from the device.
    """

    def __init__(self) -> None:
        self.lengths: list[torch.Tensor] = []
        self.warm = True

    def of(self, metadata: AttentionMetadata, block_size: int) -> list[int]:
        """The lengths as they are, or while recording the longest that the table has room for."""
        if self.warm:
            return metadata.seq_lens.tolist()  # type: ignore[no-any-return]
        self.lengths.append(metadata.seq_lens)
        return [metadata.block_tables.shape[1] * block_size] * len(metadata.seq_lens)


_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


def kv_lengths(metadata: AttentionMetadata, block_size: int) -> list[int]:
    """Lengths of keys for the kernels, also inside a region that ``capture`` records."""
    recording = _RECORDING.get()
    if recording is None or not isinstance(metadata.kv_lens, UnreadLengths):
        return list(metadata.kv_lens)
    return recording.of(metadata, block_size)


class Replay:
    """A recorded graph; calling it launches it and returns the tensors of the recording, filled anew."""

    def __init__(self, graph: Any, outputs: Any, lengths: list[torch.Tensor]) -> None:
        self._graph, self._outputs, self._lengths = graph, outputs, lengths

    def __call__(self) -> Any:
        """Waits for the lengths, not for the results."""
        if self._lengths:
            now = {id(tensor): tensor.tolist() for tensor in self._lengths}
            self._graph.update([{UPDATED: now[id(tensor)]} for tensor in self._lengths])
        self._graph.replay()
        return self._outputs


def why_not(device: str) -> str:
    """What keeps graphs from being recorded on ``device`` in this process, empty where nothing does."""
    found = profile_of(torch.device(device))
    if not found.graphs:
        return f"{found.name} records no graphs: 910B and 910C do"
    if os.environ.get(BLOCKING, "0") != "0":
        return f"{BLOCKING} is set, under which torch_npu records no graphs: unset it"
    if not hasattr(getattr(_sdk.runtime(), "NPUGraph", None), "update"):
        return f"torch-npu {_sdk.found().torch_npu} has no NPUGraph.update: a newer one records graphs"
    return ""


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """See ``DeviceSpec.capture``. The function runs once before on a stream aside, so that all it needs is there.

    What it raises there comes out as it is. Whatever a stream that is recording refuses, such as a value read on the
    host, becomes ``NotImplementedError`` with the words of CANN, and so does a chip or a release without graphs.
    """
    if reason := why_not(device):
        raise NotImplementedError(reason)
    npu, recording = _sdk.runtime(), Recording()
    token = _RECORDING.set(recording)
    try:
        with npu.device(device):
            aside = npu.Stream()
            aside.wait_stream(npu.current_stream())
            with npu.stream(aside):
                function(*example)
            npu.synchronize()
            recording.warm = False
            graph = npu.NPUGraph()
            outputs = _recorded(graph, aside, function, example)
    finally:
        _RECORDING.reset(token)
    return Replay(graph, outputs, recording.lengths)


def _recorded(graph: Any, stream: Any, function: Callable[..., Any], example: tuple[Any, ...]) -> Any:
    """As ``torch.npu.graph`` with ``auto_dispatch_capture``, which where a recording cannot be ended would leave its
    stream and its dispatch mode behind. Each graph has memory of its own: a pool that graphs shared cannot be had again
    when the last of them is gone."""
    graph.auto_dispatch_capture = True
    try:
        with _sdk.runtime().stream(stream), graph.graph_dispatch_mode:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                return function(*example)
            finally:
                graph.capture_end()
    except NotImplementedError:
        raise
    except RuntimeError as error:
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        reason = str(first).strip().partition("\n")[0]
        raise NotImplementedError(f"an NPU graph cannot record it: {reason}") from error

"""Decode steps as recorded programs of the device: fixed buffers in, logits out, no Python between the layers.

One program for each batch size, recorded when it is first needed, or at the start for the sizes that a device lists in
``Capabilities.capture_sizes``; to one of those a smaller batch is filled up with rows that write nowhere. A region that
the device refuses to record runs eagerly from then on, and the reason is kept for the statistics.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qiao.contract import AttentionMetadata, KVCache, SamplingTensors, UnreadLengths
from qiao.devices import HOST
from qiao.engine.batch import Batch
from qiao.engine.config import EngineConfig
from qiao.models.base import Model
from qiao.optable import OpTable

logger = logging.getLogger(__name__)

MOST_PROGRAMS = 64
MOST_BYTES = 128 << 20
"""Programs kept, and bytes that they may hold; the one used longest ago goes first."""

_MOVING = ("token_ids", "positions", "seq_lens", "slot_mapping")
"""The inputs that change in each step: the tokens, and what is one more than before."""


class StepBuffers:
    """The inputs of all programs, for ``size`` rows of ``width`` blocks; a program sees the first rows.

    On the host they are numpy arrays; the device's tensors share their memory or are copied to in each step. Rows that
    no sequence uses hold token 0 at position 0 of block 0, with slot -1, so that they read one key and write nothing.
    """

    def __init__(self, size: int, width: int, device: str) -> None:
        self._host: dict[str, npt.NDArray[Any]] = {
            "token_ids": np.zeros(size, np.int64),
            "positions": np.zeros(size, np.int64),
            "seq_lens": np.ones(size, np.int32),
            "block_tables": np.zeros((size, width), np.int32),
            "slot_mapping": np.full(size, -1, np.int64),
        }
        on_host = {name: torch.from_numpy(array) for name, array in self._host.items()}
        self._copied = device != "cpu"
        self._tensors = {name: x.to(device) if self._copied else x for name, x in on_host.items()}
        self._staged = on_host
        self._moving = tuple(self._host[name].data for name in _MOVING)
        self._query_start = torch.arange(size + 1, dtype=torch.int32).to(device)

    def inputs(self, size: int) -> tuple[torch.Tensor, ...]:
        """token_ids, positions, query_start, seq_lens, block_tables and slot_mapping of the first ``size`` rows."""
        t = {name: tensor[:size] for name, tensor in self._tensors.items()}
        start = self._query_start[: size + 1]
        return t["token_ids"], t["positions"], start, t["seq_lens"], t["block_tables"], t["slot_mapping"]

    def fill(self, batch: Batch, size: int) -> None:
        """Put ``batch`` into the first rows and make those up to ``size`` empty."""
        count, host = len(batch.rows), self._host
        host["token_ids"][:count] = batch.token_ids
        host["positions"][:count] = batch.positions
        host["seq_lens"][:count] = batch.seq_lens
        host["block_tables"][:count, : batch.block_tables.shape[1]] = batch.block_tables
        host["slot_mapping"][:count] = batch.slot_mapping
        if size > count:
            for name, value in (("token_ids", 0), ("positions", 0), ("seq_lens", 1), ("slot_mapping", -1)):
                host[name][count:size] = value
            host["block_tables"][count:size, 0] = 0
        if self._copied:
            self._copy(size, batch.block_tables.shape[1])

    def advance(self, token_ids: list[int]) -> None:
        """Make the batch of the last ``fill`` the next one of the same sequences, in the same blocks.

        Number by number: after a step's kernels numpy's code is in no cache, and an addition of arrays takes 20 us.
        """
        tokens, positions, seq_lens, slots = self._moving
        for i, token in enumerate(token_ids):
            tokens[i] = token
            positions[i] += 1
            seq_lens[i] += 1
            slots[i] += 1
        if self._copied:
            self._copy(len(token_ids), 0)

    def _copy(self, size: int, width: int) -> None:
        for name in _MOVING:
            self._tensors[name][:size].copy_(self._staged[name][:size])
        if width:
            name = "block_tables"
            self._tensors[name][:size, :width].copy_(self._staged[name][:size, :width])


@dataclass(frozen=True, slots=True)
class Replayed:
    """``logits`` [B, V] float32, good until the next replay. ``best`` are the same on the host, with each row's arg max
    [B] int64, as arrays over the same memory; None where the program does not choose."""

    logits: torch.Tensor
    best: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None

    @classmethod
    def of(cls, logits: torch.Tensor, best: torch.Tensor | None) -> Replayed:
        """What a program returned."""
        return cls(logits, None if best is None else (logits.numpy(), best.numpy()))


def _greedy(size: int) -> SamplingTensors:
    zeros, ones = torch.zeros(size), torch.ones(size)
    return SamplingTensors(zeros, torch.zeros(size, dtype=torch.int32), ones, zeros, zeros, True, False, False, False)


class CapturedSteps:
    """Runs decode steps by recorded programs. ``refusal`` says why it does not, empty while it does.

    ``last`` is the batch of the last step where a program ran it: its ``room`` counts down as it is run again, and to
    run it again is to run the step after it. Whoever runs anything in between sets it to None.
    """

    def __init__(self, model: Model, ops: OpTable, config: EngineConfig, caches: list[KVCache]) -> None:
        self._model, self._ops, self._caches = model, ops, caches
        self._programs: OrderedDict[int, Callable[[], Replayed]] = OrderedDict()
        self._nbytes: dict[int, int] = {}
        self._sizes = tuple(sorted(n for n in set(ops.capture_sizes) if n <= config.max_num_seqs))
        self.steps = 0
        self.last: Batch | None = None
        self._program: tuple[int, Callable[[], Replayed]] | None = None
        self.refusal = ""
        if config.enforce_eager:
            self.refusal = "--enforce-eager"
        elif ops.capture is None:
            self.refusal = "the plan has no capture of layers"
        if not self.refusal:
            self._buffers = StepBuffers(config.max_num_seqs, config.max_blocks_per_seq, ops.device)
            for size in reversed(self._sizes):
                self._record(size)

    def run(self, batch: Batch) -> Replayed | None:
        """Compute ``batch``, whose rows all decode and sample; None where it has to run eagerly.

        Raises whatever the device raises.
        """
        if batch is not self.last:
            self._program = self._filled(batch)
        else:
            batch.room -= 1
            self._buffers.advance(batch.last_tokens())
        self.last = None
        if self._program is None:
            return None
        size, program = self._program
        found = program()
        self.last = batch
        self.steps += 1
        count = len(batch.sampled)
        return found if size == count else Replayed(found.logits[:count], None)

    def _filled(self, batch: Batch) -> tuple[int, Callable[[], Replayed]] | None:
        """The program for ``batch``, which is put into the buffers, and its rows; None where there is none."""
        size = 0 if self.refusal else self._size(len(batch.rows))
        if not size:
            return None
        self._buffers.fill(batch, size)
        program = self._programs.get(size) or self._record(size)
        if program is None:
            return None
        self._programs.move_to_end(size)
        return size, program

    @property
    def nbytes(self) -> int:
        """Bytes that the programs hold, each alone, as far as the device says."""
        return sum(self._nbytes.values())

    def _size(self, count: int) -> int:
        """Rows of the program for ``count`` sequences, 0 where there is none: they are more than the largest holds."""
        if not self._ops.capture_sizes:
            return count
        return next((size for size in self._sizes if size >= count), 0)

    def _record(self, size: int) -> Callable[[], Replayed] | None:
        assert self._ops.capture is not None  # else there is a refusal from the start
        if self.refusal:
            return None
        step = partial(self._step, _greedy(size) if self._ops.device == self._ops.sample_device == HOST else None)
        try:
            replay = self._ops.capture(step, self._buffers.inputs(size), self._ops.device)
        except NotImplementedError as error:
            self.refusal = str(error)
            self._programs.clear()
            self._nbytes.clear()
            logger.info("decode steps are not captured: %s", error)
            return None

        last: tuple[object, Replayed] | None = None

        def program() -> Replayed:
            nonlocal last
            result = replay()
            if last is None or last[0] is not result:  # most programs return the same tensors, refilled
                last = (result, Replayed.of(*result))
            return last[1]

        self._programs[size] = program
        self._nbytes[size] = int(getattr(replay, "nbytes", 0))
        self._forget()
        return program

    def _forget(self) -> None:
        """Drop programs used long ago while there are too many; never the newest, nor one of the device's sizes."""
        for size in [n for n in self._programs if n not in self._sizes][:-1]:
            if len(self._programs) <= MOST_PROGRAMS and self.nbytes <= MOST_BYTES:
                return
            del self._programs[size], self._nbytes[size]

    def _step(
        self,
        greedy: SamplingTensors | None,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is recorded; with ``greedy`` also each row's arg max.

        ``plan`` is left out: it would be the plan of the step that was recorded.
        """
        metadata = AttentionMetadata(
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            query_lens=(1,) * len(token_ids),
            kv_lens=UnreadLengths(),
        )
        logits = self._model.logits(self._model.forward(token_ids, positions, self._caches, metadata))
        return logits, None if greedy is None else self._ops.sample(logits, greedy)

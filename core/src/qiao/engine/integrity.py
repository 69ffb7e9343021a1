"""Checks that blocks, references, tables and rows agree. Cheap enough for every idle moment of a test run."""

from __future__ import annotations

from collections import Counter

from qiao.engine.blocks import BlockManager
from qiao.engine.scheduler import Scheduler
from qiao.engine.sequence import Status
from qiao.errors import QiaoError


class IntegrityError(QiaoError):
    """The engine's books do not balance: a bug in Qiao, please report it with the text."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise IntegrityError(f"engine integrity: {text}")


def check_blocks(blocks: BlockManager) -> None:
    """Each block is free, cached or referenced, and exactly one of these."""
    cached = set(blocks.cache.unused) if blocks.cache is not None else set()
    free = Counter(blocks.free)
    for block, references in enumerate(blocks.references):
        places = (references > 0) + free[block] + (block in cached)
        _require(references >= 0, f"block {block} has {references} references")
        _require(places == 1, f"block {block} is in {places} places (references {references}, free {free[block]})")
    if blocks.cache is not None:
        entries = blocks.cache.entries
        _require(len(set(entries.values())) == len(entries), "two cached contents share a block")
        _require(cached <= set(entries.values()), "an unreferenced cached block has no content")
        _require(not (set(entries.values()) & set(free)), "a free block still answers prefix hits")


def check_scheduler(scheduler: Scheduler) -> None:
    """References are those of the running sequences; tables and rows mirror them; nobody waits with blocks."""
    blocks, rows = scheduler.blocks, scheduler.rows
    check_blocks(blocks)
    expected: Counter[int] = Counter()
    taken: list[int] = []
    for seq in scheduler.running:
        name = f"sequence {seq.request.id}/{seq.index}"
        expected.update(seq.blocks)
        taken.append(seq.row)
        _require(seq.status is Status.RUNNING, f"{name} runs with status {seq.status.name}")
        _require(len(set(seq.blocks)) == len(seq.blocks), f"{name} holds a block twice")
        _require(len(seq.blocks) * blocks.block_size >= seq.num_computed, f"{name} overruns its block table")
        table = rows.block_tables[seq.row]
        _require(table[: len(seq.blocks)].tolist() == seq.blocks, f"{name} differs from its table row")
        _require(not table[len(seq.blocks) :].any(), f"the table row of {name} is not padded with 0")
        if not seq.request.forked:
            taken += [s.row for s in seq.request.sequences[1:] if s.status is Status.FOLLOWING]
    for seq in scheduler.waiting.items:
        name = f"sequence {seq.request.id}/{seq.index}"
        _require(seq.row < 0 and not seq.blocks, f"{name} waits with blocks")
        _require(seq.num_computed == 0, f"{name} waits with computed tokens")
    actual = {b: n for b, n in enumerate(blocks.references) if n}
    _require(actual == dict(expected), f"references {actual} are not those of the running sequences {dict(expected)}")
    _require(len(set(taken)) == len(taken) and min(taken, default=0) >= 0, f"rows given twice: {taken}")
    _require(len(taken) + rows.num_free == len(rows.block_tables), "rows are lost")
    _require(scheduler.running == sorted(scheduler.running, key=lambda s: s.key), "running is out of order")

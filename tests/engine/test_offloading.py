"""Evicted blocks come back byte for byte, from memory and from files, within their bounds, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from qiao.contract import KVCache
from qiao.engine import Engine
from qiao.engine.blocks import BlockManager
from qiao.engine.integrity import check_blocks
from qiao.engine.offloading import BlockCopier, Offload
from qiao.engine.prefix import BlockKey, PrefixCache, block_key
from qiao.engine.tiers import DiskTier, OffloadSizes
from qiao.errors import ParameterError

from tests.support.blocks import chain
from tests.support.engine import HEAD_DIM, KV_HEADS, LAYERS, Results, TinyModel, make_engine, request, run

BLOCKS, SIZE = 6, 2
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * 4
"""Keys and values of one block of the tiny model: four tokens of float32."""


def caches(dtype: torch.dtype = torch.int8) -> list[KVCache]:
    """Two layers of different shapes, with scales where the dtype has them."""
    made = []
    for heads in (1, 3):
        key = torch.zeros(BLOCKS, SIZE, heads, 4, dtype=dtype)
        scales = [torch.zeros(BLOCKS, SIZE, heads) for _ in range(2)] if dtype is torch.int8 else [None, None]
        made.append(KVCache(key, key.clone(), SIZE, "NHD", *scales))
    return made


def fill(cache: KVCache, block: int, key: BlockKey) -> None:
    """Bytes that follow from the content's key and the place."""
    make = torch.Generator().manual_seed(int.from_bytes(key.digest[:6], "big"))
    for part in (cache.key, cache.value, cache.key_scale, cache.value_scale):
        if part is not None:
            part[block] = (30 * torch.randn(part[block].shape, generator=make)).clamp(-99, 99).to(part.dtype)


class OffloadMachine(RuleBasedStateMachine):
    """Tables of full blocks over a manager with both tiers; every block of a table holds what its key says."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.caches = caches()
        self.tables: list[tuple[list[int], list[BlockKey]]] = []
        self.offload = self.open()
        self.manager = BlockManager(BLOCKS, SIZE, PrefixCache(), lambda evicted: self.offload.save(evicted))

    def open(self) -> Offload:
        copier = BlockCopier(self.caches, None)
        assert copier.block_bytes == 2 * SIZE * (1 + 3) * (4 + 4)
        self.file_bytes = copier.block_bytes + 60 + 8 * SIZE
        return Offload(
            copier, SIZE, OffloadSizes(2 * copier.block_bytes + 1, self.folder, 4 * self.file_bytes, "model")
        )

    def teardown(self) -> None:
        self.offload.disk.flush()
        shutil.rmtree(self.folder)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE), how=st.sampled_from(["wait", "try", ""])
    )
    def start(self, tokens: list[int], how: str) -> None:
        """As ``Scheduler._readable``, ``_admit`` and ``_start`` do it; ``how`` it sees to files, or not at all."""
        keys = chain(tokens, SIZE)
        hits = self.manager.cache.match(keys)
        if len(keys) - len(hits) + self.manager.unreferenced(hits) > self.manager.available:
            return
        behind = keys[len(hits) :]
        known = self.offload.known(behind)
        if how and not self.offload.ready(behind, wait=how == "wait"):
            return
        if how:
            assert len(self.offload.load(behind)) == self.offload.known(behind) <= known
            assert self.offload.ready(behind, wait=True)
        contents = self.offload.load(behind[: self.offload.known(behind)])
        self.manager.share(hits)
        new = self.manager.allocate(len(keys) - len(hits))
        self.offload.restore(new[: len(contents)], contents)
        for i, block in enumerate(new):
            if i >= len(contents):
                for cache in self.caches:
                    fill(cache, block, behind[i])
            self.manager.cache.register(block, behind[i])
        self.tables.append((hits + new, keys))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table)

    @rule(data=st.data(), how=st.sampled_from(["cut", "flip", "gone", "empty", "longer", "other"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        self.offload.disk.flush()
        files = sorted(self.folder.glob("*.kv"))
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        found = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(found) - 1))
        if how == "gone":
            path.unlink()
        elif how == "other":
            path.write_bytes(files[0].read_bytes())
        else:
            flipped = found[:at] + bytes([found[at] ^ 1]) + found[at + 1 :]
            path.write_bytes({"cut": found[:at], "flip": flipped, "empty": b"", "longer": found + b"x"}[how])

    @rule()
    def reset(self) -> None:
        self.manager.forget()
        self.offload.clear()

    @rule()
    def restart(self) -> None:
        """Another process: the files are all that is left."""
        self.offload.disk.flush()
        for table, _ in self.tables:
            self.manager.release(table)
        self.tables = []
        self.offload = self.open()
        self.manager = BlockManager(BLOCKS, SIZE, PrefixCache(), lambda evicted: self.offload.save(evicted))
        for cache in self.caches:
            cache.key.zero_()

    @invariant()
    def blocks_hold_what_their_keys_say(self) -> None:
        check_blocks(self.manager)
        for table, keys in self.tables:
            for block, key in zip(table, keys, strict=True):
                for cache, wanted in zip(self.caches, caches(), strict=True):
                    fill(wanted, 0, key)
                    for part in ("key", "value", "key_scale", "value_scale"):
                        assert torch.equal(getattr(cache, part)[block], getattr(wanted, part)[0])

    @invariant()
    def bounds_hold(self) -> None:
        self.offload.disk.flush()
        files = [path.stat().st_size for path in self.folder.glob("*")]
        assert self.offload.host.used <= self.offload.capacity
        assert sum(files) <= 4 * self.file_bytes + 25  # each damage may have added a byte


TestOffload = OffloadMachine.TestCase
TestOffload.settings = settings(derandomize=True, max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [1, 5])
def test_blocks_come_back_bit_for_bit_elsewhere(dtype: torch.dtype, count: int) -> None:
    made = caches(dtype)
    for block in range(BLOCKS):
        for cache in made:
            fill(cache, block, block_key(b"", [block]))
    before = [cache.key.clone() for cache in made]
    copier = BlockCopier(made, None)
    contents = copier.save(list(range(count)))
    target = [(block + 1) % BLOCKS for block in range(count)]
    copier.restore(target, contents)
    for cache, old in zip(made, before, strict=True):
        assert torch.equal(cache.key[target], old[:count])


def conversation(engine: Engine, name: str) -> Results:
    params: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "temperature": 0.7, "seed": 5}
    return run(engine, [request(name, [7, *range(30)], **params)])


def crowd_out(engine: Engine) -> None:
    """Fill the cache with other prompts."""
    for i in range(6):
        run(engine, [request(f"other{i}", [60 + i, *range(33)], max_tokens=1)])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_answer_after_a_restore_is_bitwise_that_after_a_hit(tier: str, tmp_path: Path) -> None:
    host = 1 << 20 if tier == "host" else 0
    sizes = OffloadSizes(host, tmp_path, 1 << 20, "x")
    plain = make_engine(num_blocks=12)
    conversation(plain, "first")
    hit = conversation(plain, "hit")
    assert plain.stats().prefix_hits == 28
    engine = make_engine(num_blocks=12, kv_offloading=sizes)
    conversation(engine, "first")
    crowd_out(engine)
    restored = conversation(engine, "hit")
    stats = engine.stats().offload
    assert stats is not None
    assert (stats.host_hits, stats.disk_hits) == ((28, 0) if tier == "host" else (0, 28))
    assert engine.stats().prefix_hits == 0
    assert stats.load_bytes == stats.load_sizes.sum == stats.load_blocks * BLOCK_BYTES == 7 * BLOCK_BYTES
    assert stats.load_seconds > 0 and sum(stats.load_sizes.counts) == 1
    totals = engine.stats()
    assert (totals.prompt_from_device, totals.prompt_from_outside) == (0, 28)
    for found, wanted in zip(restored.outputs, hit.outputs, strict=True):
        assert (found.token_ids, found.logprobs, found.finish_reason) == (
            wanted.token_ids,
            wanted.logprobs,
            wanted.finish_reason,
        )
        assert found.num_cached_tokens == 28


def fetches(engine: Engine) -> tuple[int, ...]:
    """Waiting requests whose files are not being read yet, are being read, and have been read."""
    stats = engine.stats().offload
    assert stats is not None
    return tuple(stats.fetches[stage] for stage in ("waiting_to_start", "in_progress", "completed_waiting"))


@pytest.mark.parametrize("damaged", [False, True])
def test_answers_go_on_while_files_are_read(damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs files waits for them, and nobody else does; what a damaged file held is computed again."""
    sizes = OffloadSizes(0, tmp_path, 1 << 20, "x")
    first = make_engine(num_blocks=12, kv_offloading=sizes)
    wanted = conversation(first, "x").of("x")
    crowd_out(first)
    assert first._offload is not None and first._offload.disk is not None
    first._offload.disk.flush()
    engine = make_engine(num_blocks=40, kv_offloading=sizes)
    offload = engine._offload
    assert offload is not None and offload.disk is not None
    may_read, get = Event(), offload.disk.get
    monkeypatch.setattr(offload.disk, "get", lambda key: get(key) if may_read.wait(60) and not damaged else None)
    engine.add_request(request("other", [50, 51], max_tokens=40))
    engine.step()
    params: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "temperature": 0.7, "seed": 5}
    engine.add_request(request("again", [7, *range(30)], **params))
    for _ in range(5):
        assert {output.request_id for output in engine.step()} == {"other"}
    assert engine.stats().waiting == 1
    assert fetches(engine) == (0, 1, 0)
    may_read.set()
    offload._reader.submit(int).result()
    assert fetches(engine) == (0, 0, 1)
    assert {output.request_id for output in engine.step()} == {"other", "again"}
    assert run(engine).of("again") == wanted[1:]
    stats = engine.stats().offload
    assert stats is not None and stats.disk_hits == (0 if damaged else 28)
    assert fetches(engine) == (0, 0, 0) and stats.fetched_blocks == 0
    assert sum(stats.waits.counts) == 1 and stats.waits.sum > 0


def test_files_serve_the_next_engine_and_no_other_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def engine(identity: str) -> Engine:
        return make_engine(num_blocks=12, kv_offloading=OffloadSizes(0, tmp_path, 1 << 20, identity))

    first = engine("a")
    wanted = conversation(first, "x")
    crowd_out(first)
    assert first._offload is not None and first._offload.disk is not None
    first._offload.disk.flush()
    second, other = engine("a"), engine("b")
    assert conversation(second, "x").of("x") == conversation(other, "x").of("x") == wanted.of("x")
    hits = [e.stats().offload for e in (second, other)]
    assert [one and one.disk_hits for one in hits] == [28, 0]
    for path in tmp_path.glob("a-*.kv"):
        path.write_bytes(path.read_bytes()[:-1])
    third = engine("a")
    assert conversation(third, "x").of("x") == wanted.of("x")
    found = third.stats().offload
    assert found is not None and found.disk_hits == 0
    told = [r.getMessage() for r in caplog.records if "its checksum is wrong" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("a KV block is not used: ")  # not one for each file
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.kv"))


def test_preemption_brings_blocks_back_instead_of_computing_them(tmp_path: Path) -> None:
    items = [request(str(i), [i] * 9, max_tokens=30, temperature=0.0) for i in range(5)]
    plain = run(make_engine(), items)
    engine = make_engine(num_blocks=14, kv_offloading=OffloadSizes(1 << 20))
    found = run(engine, items)
    assert found.tokens == plain.tokens
    stats = engine.stats()
    assert stats.preemptions and stats.offload is not None and stats.offload.host_hits > 0


@pytest.mark.parametrize("kept", [True, False])
def test_stores_are_counted_as_they_happen(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the blocks that the copier was asked for; memory for none of them loses them all."""
    engine = make_engine(num_blocks=12, kv_offloading=OffloadSizes((1 << 20) * kept))
    assert engine._offload is not None
    copied: list[int] = []
    save = engine._offload._copier.save
    monkeypatch.setattr(engine._offload._copier, "save", lambda blocks: copied.append(len(blocks)) or save(blocks))
    conversation(engine, "a")
    crowd_out(engine)
    conversation(engine, "a")
    crowd_out(engine)
    stats, count = engine.stats().offload, sum(copied)
    assert stats is not None and count > 0
    assert stats.store_bytes == stats.store_sizes.sum == count * BLOCK_BYTES
    assert sum(stats.store_sizes.counts) == len(copied) and stats.store_seconds > 0
    outcomes = stats.save_outcomes
    assert outcomes["stored" if kept else "dropped_cpu_full"] == count
    assert outcomes["dropped_cpu_full" if kept else "stored"] == 0
    assert stats.failures == (0 if kept else count)
    assert (outcomes["skipped_already_cached"] > 0) == kept, "what came back is still in memory"
    assert sum(stats.lookups.counts) >= 2
    totals = engine.stats()
    assert totals.prompt_tokens == 2 * (31 + 6 * 34)
    assert (totals.prompt_from_device, totals.prompt_from_outside > 0) == (0, kept)


def test_what_the_disk_does_not_take_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qiao.engine.tiers.MOST_PENDING", BLOCK_BYTES - 1)
    engine = make_engine(num_blocks=12, kv_offloading=OffloadSizes(0, tmp_path, 1 << 20, "x"))
    conversation(engine, "a")
    crowd_out(engine)
    stats = engine.stats().offload
    assert stats is not None and stats.failures == stats.save_outcomes["dropped_cpu_full"] > 0
    assert (stats.pending_blocks, stats.disk_bytes, stats.save_outcomes["stored"]) == (0, 0, 0)


class Poisoned(TinyModel):
    """Gives NaN while ``bad``."""

    bad = False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        return found * torch.nan if self.bad else found


def test_what_gave_nan_does_not_come_back() -> None:
    engine = make_engine(model=Poisoned, num_blocks=12, kv_offloading=OffloadSizes(1 << 20))
    conversation(engine, "x")
    crowd_out(engine)
    engine._runner.model.bad = True  # type: ignore[attr-defined]
    assert set(conversation(engine, "bad").reasons.values()) == {"error"}
    engine._runner.model.bad = False  # type: ignore[attr-defined]
    before = engine.stats()
    assert before.offload is not None and before.offload.host_hits == 28
    conversation(engine, "y")
    after = engine.stats()
    assert after.offload is not None
    assert (after.offload.host_hits, after.prefix_hits) == (28, before.prefix_hits)


def test_a_reset_forgets_everything() -> None:
    engine = make_engine(num_blocks=12, kv_offloading=OffloadSizes(1 << 20))
    conversation(engine, "x")
    crowd_out(engine)
    assert engine._offload is not None and engine._offload.host.used
    engine.reset_prefix_cache()
    assert engine._offload.host.used == 0


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        make_engine(kv_offloading=OffloadSizes(0, open_to_all, 1 << 20, "x"))
    with pytest.raises(ParameterError, match="needs prefix caching"):
        make_engine(enable_prefix_caching=False, kv_offloading=OffloadSizes(1))


def test_files_that_nobody_writes_any_more_are_deleted(tmp_path: Path) -> None:
    left, fresh = tmp_path / "old.1.part", tmp_path / "new.2.part"
    for path in (left, fresh):
        path.write_bytes(b"half")
    os.utime(left, (1.0, 1.0))
    tier = DiskTier(tmp_path, 1 << 20, "a")
    assert (left.exists(), fresh.exists(), tier.used) == (False, True, 0)

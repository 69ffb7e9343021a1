"""Packed weights on disk: what is trusted, what is not, and what happens to the files."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.loading import packed_cache
from qiao.loading.packed_cache import PackedCache, cache_folder, code_identity, source_identity
from safetensors.torch import load_file

KEY: dict[str, Any] = {"model": "m.gguf", "packing": "avx2", "sources": [["m.gguf", 7, 1, "ab"]]}
NOTES = {"stream": [["a", None]], "packed": []}


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "codes": torch.randint(-128, 127, (3, 37), dtype=torch.int8, generator=made),
        "scale": torch.randn(5, 3, generator=made).half(),
        "bf": torch.randn(4, 2, generator=made).bfloat16(),
        "fp8": torch.randn(3, 3, generator=made).to(torch.float8_e4m3fn),
        "strided": torch.arange(12).view(3, 4).T,
        "number": torch.tensor(32),
        "none": torch.empty(0, 4),
    }


def same(found: packed_cache.PackedFile | None) -> bool:
    wanted = tensors()
    assert found is not None
    assert found.tensors.keys() == wanted.keys()
    assert found.notes == NOTES
    return all(
        x.dtype == wanted[k].dtype and torch.equal(x.float(), wanted[k].float()) for k, x in found.tensors.items()
    )


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    cache = PackedCache(tmp_path / "a" / "packed")
    assert cache.write(KEY, tensors(), NOTES)
    return cache


def test_what_is_written_comes_back(cache: PackedCache) -> None:
    assert same(cache.read(KEY))
    assert [path.name for path in cache.folder.iterdir()] == [cache.path(KEY).name], "no temporary file is left"


def test_safetensors_reads_the_file_too(cache: PackedCache) -> None:
    held = load_file(cache.path(KEY))
    assert all(torch.equal(held[name].float(), x.float()) for name, x in tensors().items())


def test_tensors_begin_where_kernels_want_them(cache: PackedCache) -> None:
    found = cache.read(KEY)
    assert found is not None
    assert all(x.data_ptr() % 64 == 0 for x in found.tensors.values() if x.numel())


def test_only_the_user_may_read_and_write(cache: PackedCache) -> None:
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.path(KEY).stat().st_mode & 0o777 == 0o600


def test_writing_to_the_tensors_does_not_reach_the_file(cache: PackedCache) -> None:
    found = cache.read(KEY)
    assert found is not None
    found.tensors["codes"].zero_()
    assert same(cache.read(KEY))


@pytest.mark.parametrize("change", [{"packing": "avx512"}, {"sources": [["m.gguf", 7, 2, "ab"]]}, {"more": 1}])
def test_another_key_is_another_file(cache: PackedCache, change: dict[str, Any]) -> None:
    assert cache.read({**KEY, **change}) is None


def test_a_file_under_the_name_of_another_key_is_not_trusted(cache: PackedCache) -> None:
    """As after a collision, or where somebody renamed it; the key in the file counts."""
    other = {**KEY, "packing": "avx512"}
    os.rename(cache.path(KEY), cache.path(other))
    assert cache.read(other) is None


def test_another_version_is_not_read(cache: PackedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "VERSION", packed_cache.VERSION + 1)
    assert cache.read(KEY) is None
    assert cache.write(KEY, tensors(), NOTES)
    assert same(cache.read(KEY))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = PackedCache(tmp_path_factory.mktemp("c") / "packed")
    assert cache.write(KEY, tensors(), NOTES)
    path = cache.path(KEY)
    content = bytearray(path.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little")
    used = [
        range(start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__" and not name.startswith("pad.")
    ]
    place = data.draw(st.sampled_from([i for part in (range(len(content[: start - 64])), *used) for i in part]))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found = cache.read(KEY)
    assert found is None or same(found), "a change of white space may pass"


@pytest.mark.parametrize("size", [0, 7, 8, 100, 900, -1])
def test_a_cut_file_is_noticed_and_written_anew(cache: PackedCache, size: int) -> None:
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes()[:size])
    assert cache.read(KEY) is None
    assert cache.write(KEY, tensors(), NOTES)
    assert same(cache.read(KEY))


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_trusted(cache: PackedCache, mode: int) -> None:
    cache.path(KEY).chmod(mode)
    assert cache.read(KEY) is None


def test_a_folder_that_others_can_write_is_not_used(cache: PackedCache) -> None:
    cache.folder.chmod(0o770)
    assert cache.read(KEY) is None
    assert not cache.write(KEY, tensors(), NOTES)


def test_links_are_not_followed(cache: PackedCache, tmp_path: Path) -> None:
    os.rename(cache.path(KEY), tmp_path / "elsewhere")
    cache.path(KEY).symlink_to(tmp_path / "elsewhere")
    assert cache.read(KEY) is None


def test_a_disk_that_fails_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not PackedCache(tmp_path / "file" / "packed").write(KEY, tensors(), NOTES)


def _write_often(folder: Path) -> None:
    for _ in range(20):
        assert PackedCache(folder).write(KEY, tensors(), NOTES)


def test_several_writers_at_once(cache: PackedCache) -> None:
    """A reader sees a whole file at any moment, and keeps the one that it has mapped."""
    first = cache.read(KEY)
    writers = [multiprocessing.get_context("fork").Process(target=_write_often, args=(cache.folder,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert same(cache.read(KEY))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert same(first)
    assert len(list(cache.folder.iterdir())) == 1


def test_old_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PackedCache(tmp_path)
    keys = [{"model": str(i)} for i in range(4)]
    for i, key in enumerate(keys[:3]):
        assert cache.write(key, {"x": torch.zeros(1000)}, NOTES)
        os.utime(cache.path(key), (i, i))
    assert cache.read(keys[0]) is not None, "used now, and so the last to go"
    monkeypatch.setattr(packed_cache, "LIMIT_BYTES", 3 * cache.path(keys[0]).stat().st_size)
    assert cache.write(keys[3], {"x": torch.zeros(1000)}, NOTES)
    assert [entry.model for entry in cache.entries() if entry.model != "3"] == ["0", "2"]
    monkeypatch.setattr(packed_cache, "LIMIT_BYTES", 10)
    assert not cache.write(keys[3], {"x": torch.zeros(1000)}, NOTES)


def test_a_full_disk_costs_the_oldest_files_then_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is pretended: 100,000 bytes, of which the files here and others' take their part."""
    cache, others = PackedCache(tmp_path), [0]

    class Disk:
        f_frsize, f_blocks = 1, 100_000

        @property
        def f_bavail(self) -> int:
            return 100_000 - others[0] - sum(entry.size for entry in cache.entries())

    monkeypatch.setattr(packed_cache.os, "statvfs", lambda _: Disk())
    for i in range(4):
        assert cache.write({"model": str(i)}, {"x": torch.zeros(2000)}, NOTES)
        os.utime(cache.path({"model": str(i)}), (i, i))
    others[0] = 100_000 - 5_000 - sum(entry.size for entry in cache.entries())
    assert cache.write({"model": "4"}, {"x": torch.zeros(2000)}, NOTES)
    assert {entry.model for entry in cache.entries()} == {"1", "2", "3", "4"}
    others[0] = 96_000
    assert not cache.write({"model": "5"}, {"x": torch.zeros(2000)}, NOTES)
    assert len(cache.entries()) == 4, "deleting them would not have made it fit"


def test_what_a_dead_writer_left_is_removed(cache: PackedCache) -> None:
    old, new = cache.folder / "x.part", cache.folder / "y.part"
    for part in (old, new):
        part.write_text("")
    os.utime(old, (0, 0))
    assert cache.write(KEY, tensors(), NOTES)
    assert not old.exists()
    assert new.exists()


def test_clear(cache: PackedCache) -> None:
    (entry,) = cache.entries()
    assert (entry.model, entry.size) == ("m.gguf", cache.path(KEY).stat().st_size)
    assert cache.clear() == entry.size
    assert cache.entries() == []
    assert PackedCache(cache.folder / "none").entries() == []


def test_where_files_go(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert cache_folder("off", home) is None
    assert cache_folder(None, {"QIAO_PACKED_CACHE": "off"}) is None
    assert cache_folder("/x", {"QIAO_PACKED_CACHE": "off"}) == Path("/x")
    assert cache_folder(None, {"QIAO_PACKED_CACHE": "/y"}) == Path("/y")
    assert cache_folder(None, {"XDG_CACHE_HOME": "/z"}) == Path("/z/qiao/packed")
    assert cache_folder(None, {}) == Path("~/.cache/qiao/packed").expanduser()


def test_identity_of_sources(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(bytes(1_000_000))
    os.utime(file, ns=(5, 5))
    before = source_identity([file])
    assert source_identity([file]) == before
    for change in (lambda: file.write_bytes(bytes(1_000_001)), lambda: os.utime(file, ns=(5, 6))):
        change()
        assert source_identity([file]) != before
    file.write_bytes(b"\1" + bytes(999_999))
    os.utime(file, ns=(5, 5))
    assert source_identity([file]) != before, "the first bytes are a sample"


def test_identity_of_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = code_identity([tmp_path])
    assert code_identity([tmp_path]) == before
    (tmp_path / "a.py").write_text("2")
    assert code_identity([tmp_path]) != before

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.errors import ModelError
from qiao.loading import iter_weights, resolve
from qiao.loading.safetensors import read_header
from safetensors.torch import load_file, save_file


def load(folder: Path) -> dict[str, torch.Tensor]:
    return dict(iter_weights(resolve(folder), progress=False))


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any], tail: bytes | None = None) -> None:
    """Change the header of a file; ``tail`` replaces the data."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    result = change(header)
    text = result if isinstance(result, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + (raw[8 + length :] if tail is None else tail))


@pytest.fixture
def copy(rand: Path, tmp_path: Path) -> Path:
    return shutil.copytree(rand, tmp_path / "m")


@pytest.fixture
def copy_sharded(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "m")


def test_shards_hold_the_same_tensors_as_one_file(rand: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = load_file(rand / "model.safetensors")
    for folder in (rand, sharded):
        loaded = load(folder)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_header_agrees_with_the_library(rand: Path) -> None:
    expected = load_file(rand / "model.safetensors")
    entries = read_header(rand / "model.safetensors")
    assert {e.name: e.shape for e in entries} == {n: tuple(t.shape) for n, t in expected.items()}


def test_only_one_tensor_at_a_time_is_held(sharded: Path) -> None:
    """The iterator keeps no tensor: what a consumer drops is gone."""
    import gc
    import weakref

    seen = []
    for _, tensor in iter_weights(resolve(sharded), progress=False):
        seen.append(weakref.ref(tensor))
        del tensor
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_truncated_file(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated"):
        load(copy)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 0, 1, 10**7])
def test_header_length_out_of_range(copy: Path, length: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(ModelError, match="damaged"):
        load(copy)


def test_short_and_empty_files(copy: Path) -> None:
    for content in (b"", b"abc", b"\x02\0\0\0\0\0\0\0"):
        (copy / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match="damaged"):
            load(copy)


def overlap(header: dict[str, Any]) -> None:
    for name, (start, end) in {n: v["data_offsets"] for n, v in header.items() if n != "__metadata__"}.items():
        if start:
            header[name]["data_offsets"] = [start - 4, end - 4]


def gap(header: dict[str, Any]) -> None:
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][0])
    for name in names[1:]:
        header[name]["data_offsets"] = [x + 4 for x in header[name]["data_offsets"]]


def wrong_shape(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [63]


def wrong_dtype(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["dtype"] = "F16"


def odd_dtype(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["dtype"] = "Q17"


def negative(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = [-256, 0]


def no_offsets(header: dict[str, Any]) -> None:
    del header["model.norm.weight"]["data_offsets"]


def twice(header: dict[str, Any]) -> bytes:
    name = json.dumps("model.norm.weight")
    return json.dumps(header).replace("{", "{" + f"{name}: {json.dumps(header['model.norm.weight'])}, ", 1).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (overlap, "overlaps"),
        (gap, "gap|truncated"),
        (wrong_shape, "model.norm.weight F32.*needs 252 bytes"),
        (wrong_dtype, "model.norm.weight F16.*needs 128 bytes"),
        (odd_dtype, "dtype 'Q17'"),
        (negative, "entry of model.norm.weight"),
        (no_offsets, "entry of model.norm.weight"),
        (twice, "listed twice"),
        (lambda header: b"[1, 2]", "not a JSON object"),
        (lambda header: b"{broken", "not JSON"),
        (lambda header: b"[" * 100_000, "not JSON"),
    ],
)
def test_headers_that_lie(copy: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    rewrite(copy / "model.safetensors", change)
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_missing_shard_is_named(copy_sharded: Path) -> None:
    victim = sorted(copy_sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load(copy_sharded)


def test_missing_shard_is_named_without_an_index(copy_sharded: Path) -> None:
    (copy_sharded / "model.safetensors.index.json").unlink()
    assert len(load(copy_sharded)) == 21
    victim = sorted(copy_sharded.glob("*.safetensors"))[-1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load(copy_sharded)


def test_index_that_names_a_tensor_its_shard_lacks(copy_sharded: Path) -> None:
    index = copy_sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.ghost.weight"] = next(iter(data["weight_map"].values()))
    index.write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"lacks model\.ghost\.weight"):
        load(copy_sharded)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", 3, None])
def test_index_cannot_point_elsewhere(copy_sharded: Path, shard: object) -> None:
    index = copy_sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ModelError, match="plain file name"):
        load(copy_sharded)


def test_a_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"a: is in both one\.safetensors and two\.safetensors"):
        load(tmp_path)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_and_not_run(copy: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ModelError, match=rf"pickle.*{name}"):
        load(copy)
    assert not marker.exists()


def test_safetensors_are_preferred_where_both_exist(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    assert len(load(copy)) == 21
    assert not marker.exists()


def test_git_lfs_pointer(copy: Path) -> None:
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_is_named_and_infinity_is_not_taken_for_it(tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / "config.json").write_text("{}")
    fine = torch.tensor([1.0, float("inf"), float("-inf"), 3e4, 3e4], dtype=dtype)
    save_file({"fine": fine, "ids": torch.tensor([1, 2])}, tmp_path / "model.safetensors")
    assert set(load(tmp_path)) == {"fine", "ids"}
    save_file({"fine": fine, "sick": torch.tensor([1.0, float("nan")], dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="sick holds NaN"):
        load(tmp_path)


def test_nothing_to_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load(tmp_path)


@settings(
    derandomize=True, max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_always_a_model_error(data: st.DataObject, small: tuple[Path, bytes]) -> None:
    """A header with other bytes, a file that was cut or grew: refused, or the same names with the same sizes."""
    folder, whole = small
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole) + 8)))
    content = content[:size] + bytes(max(0, size - len(whole)))
    (folder / "model.safetensors").write_bytes(content)
    try:
        found = load(folder)
    except ModelError as error:
        assert "model.safetensors" in str(error) or str(folder) in str(error)
    else:
        assert len(content) == len(whole), "a file of another size was taken"
        assert sum(tensor.nbytes for tensor in found.values()) == len(whole) - length


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, bytes]:
    """A folder whose file has tensors of several types, one of them without elements, and the file's bytes."""
    tensors = {
        "a": torch.arange(6, dtype=torch.int32).view(2, 3),
        "b.weight": torch.ones(3, 2),
        "c": torch.zeros(0, 4),
        "d": torch.ones(5, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path, (tmp_path / "model.safetensors").read_bytes()

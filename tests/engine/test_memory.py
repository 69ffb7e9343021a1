"""KV size follows from the tightest limit, and says so in figures."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from qiao.engine.memory import KVSize, memory_limit, size_kv
from qiao.errors import ParameterError

from tests.support.engine import SHAPE

GIB = 1 << 30
BLOCK = 2 * 2 * 2 * 8 * 4 * 16  # key and value, 2 layers, 2 heads of 8, 4 bytes, 16 tokens


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def machine(root: Path, files: dict[str, str], total_gib: int = 64, free_gib: int = 60) -> Path:
    files = {"proc/meminfo": f"MemTotal: {total_gib << 20} kB\nMemAvailable: {free_gib << 20} kB\n"} | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_host_alone(tmp_path: Path) -> None:
    limit = memory_limit(machine(tmp_path, {}))
    assert (limit.bytes, limit.free) == (64 * GIB, 60 * GIB)
    assert "64.00 GiB" in limit.explanation


def test_cgroup_v2_counts_reclaimable_cache_as_free(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    limit = memory_limit(root)
    assert (limit.bytes, limit.free) == (2 * GIB, 3 * GIB // 2)
    assert "cgroup v2 2.00 GiB" in limit.explanation and "host 64.00 GiB" in limit.explanation


def test_cgroup_v2_parent_limits_apply(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": f"{3 * GIB}",
            "sys/fs/cgroup/outer/memory.current": "0",
            "sys/fs/cgroup/outer/inner/memory.max": "max",
        },
    )
    assert memory_limit(root).bytes == 3 * GIB


@pytest.mark.parametrize("text", ["max\n", f"{(1 << 63) - 4096}\n", "", "rubbish"])
def test_the_word_max_and_huge_numbers_are_no_limit(tmp_path: Path, text: str) -> None:
    files = {"sys/fs/cgroup/memory.max": text, "sys/fs/cgroup/memory/memory.limit_in_bytes": text}
    assert memory_limit(machine(tmp_path, files)).bytes == 64 * GIB


def test_cgroup_v1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n5:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}",  # a container sees its own group at the mount
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
        },
    )
    limit = memory_limit(root)
    assert (limit.bytes, limit.free) == (4 * GIB, 3 * GIB)


def test_address_space_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = resource.RLIM_INFINITY
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (5 * GIB, none) if kind == resource.RLIMIT_AS else (none, none)
    )
    root = machine(tmp_path, {"proc/self/status": f"Name: x\nVmSize: {1 << 20} kB\n"})
    limit = memory_limit(root)
    assert (limit.bytes, limit.free) == (5 * GIB, 4 * GIB)


def sized(**changes: object) -> KVSize:
    settings = {
        "total": 2 * GIB,
        "free": 3 * GIB // 2,
        "source": "cgroup v2 2.00 GiB",
        "utilization": 0.9,
        "reserve": GIB // 2,
        "block_size": 16,
        "element_size": 4,
        "max_model_len": 1 << 20,
        "max_num_seqs": 256,
    }
    return size_kv(SHAPE, **(settings | changes))


def test_automatic_size_is_the_share_less_use_and_reserve() -> None:
    size = sized()
    assert size.block_bytes == BLOCK
    assert size.num_blocks == (int(2 * GIB * 0.9) - GIB // 2 - GIB // 2) // BLOCK
    assert "90% of 2.00 GiB" in size.explanation and "cgroup v2 2.00 GiB" in size.explanation


def test_automatic_size_takes_no_more_than_can_be_used() -> None:
    assert sized(max_model_len=100, max_num_seqs=3).num_blocks == 3 * 7


def test_a_short_cache_says_where_sequences_end() -> None:
    assert "sequences end at 32 tokens" in sized(num_blocks=2).explanation


def test_fixed_settings_are_honoured() -> None:
    assert sized(num_blocks=77).num_blocks == 77
    assert sized(kv_bytes=10 * BLOCK + 5).num_blocks == 10


@pytest.mark.parametrize(
    ("setting", "field", "figure"),
    [
        ({"num_blocks": GIB // BLOCK + 1}, "num_gpu_blocks_override", "1.00 GiB"),
        ({"kv_bytes": 27 * GIB}, "kv_cache_memory_bytes", "27.00 GiB"),
        ({"kv_bytes": 1}, "kv_cache_memory_bytes", str(BLOCK)),
        ({"reserve": 2 * GIB}, "gpu_memory_utilization", "2.00 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(setting: dict[str, int], field: str, figure: str) -> None:
    with pytest.raises(ParameterError) as caught:
        sized(**setting)
    assert caught.value.field == field
    assert figure in str(caught.value)

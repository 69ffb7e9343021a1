"""Cores, memory nodes and quotas of machines laid out as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.processors import control_groups, cores, cpu_quota, granted_cpus, nodes, parse_cpus

from tests.support.machines import EVEN_AND_ODD, KUNPENG, PHYTIUM, RYZEN, XEONS, Machine, write


@pytest.mark.parametrize(
    ("machine", "allowed", "wanted"),
    [
        (RYZEN, range(24), list(range(12))),
        (RYZEN, [4, 5, 16, 17, 18], [4, 5, 18]),
        (RYZEN, [12, 23], [12, 23]),
        (XEONS, range(112), list(range(56))),
        (XEONS, [0, 1, 28, 29, 30, 56], [28, 29, 30, 0, 1]),
        (EVEN_AND_ODD, range(64), [*range(0, 32, 2), *range(1, 32, 2)]),
        (KUNPENG, range(128), list(range(128))),
        (KUNPENG, range(60, 100), [*range(64, 96), *range(60, 64), *range(96, 100)]),
        (PHYTIUM, range(4), [2, 3, 0, 1]),
    ],
)
def test_one_processor_of_each_core_fast_ones_first_and_node_by_node(
    tmp_path: Path, machine: Machine, allowed: list[int], wanted: list[int]
) -> None:
    found = cores(machine.lay_out(tmp_path), allowed)
    assert [core.cpu for core in found] == wanted
    for core in found:
        assert core.node == next(n for n, text in machine.nodes.items() if core.cpu in parse_cpus(text))
        assert core.capacity == machine.capacity.get(core.cpu, 1024)


@settings(derandomize=True, max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([RYZEN, XEONS, KUNPENG, PHYTIUM]), st.data())
def test_no_core_twice_and_none_that_is_not_allowed(
    tmp_path_factory: pytest.TempPathFactory, machine: Machine, data: st.DataObject
) -> None:
    allowed = data.draw(st.sets(st.sampled_from([cpu for core in machine.cores for cpu in core]), min_size=1))
    found = {core.cpu for core in cores(machine.lay_out(tmp_path_factory.mktemp("machine")), sorted(allowed))}
    assert found <= allowed
    assert len(found) == sum(bool(allowed & set(core)) for core in machine.cores)
    assert all(len(found & set(core)) <= 1 for core in machine.cores)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert [core.cpu for core in cores(tmp_path, [3, 5])] == [3, 5]
    assert nodes(tmp_path) == {} and cpu_quota(tmp_path) is None
    assert granted_cpus(tmp_path, [3, 5]) == 2


def test_nodes_with_memory_alone_are_left_out(tmp_path: Path) -> None:
    for number, cpus in ((0, "0-1,4"), (10, "2-3,5-7"), (2, ""), (3, "x")):
        write(tmp_path, f"sys/devices/system/node/node{number}/cpulist", cpus)
    assert nodes(tmp_path) == {0: [0, 1, 4], 10: [2, 3, 5, 6, 7]}


@pytest.mark.parametrize("text", ["-1", "a", "1,b"])
def test_a_list_of_processors_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("files", "quota", "granted"),
    [
        ({"cpu.max": "max 100000"}, None, 8),
        ({"cpu.max": "250000 100000"}, 2.5, 2),
        ({"cpu.max": "50000 100000"}, 0.5, 1),
        ({"cpu.max": "9900000 100000"}, 99.0, 8),
        ({"cpu.max": ""}, None, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0, 3),
    ],
)
def test_what_a_container_is_granted(tmp_path: Path, files: dict[str, str], quota: float | None, granted: int) -> None:
    for name, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text)
    write(tmp_path, "proc/self/cgroup", "0::/not/visible/here")
    assert cpu_quota(tmp_path) == quota
    assert granted_cpus(tmp_path, range(8)) == granted


def test_groups_of_both_versions_and_those_above(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/x/y\n3:memory:/m\n1:name=systemd:/z\n0::/a/b:c\nodd")
    top = tmp_path / "sys/fs/cgroup"
    found = list(control_groups("cpu", tmp_path))
    wanted = ("", "a", "a/b:c", "cpu,cpuacct/x/y", "cpu,cpuacct/x", "cpu/x/y")
    assert {top / name for name in wanted} <= set(found)
    assert not {top / "m", top / "memory/m", top / "z", top / "name=systemd/z"} & set(found)
    assert {top / "memory/m", top / "memory"} <= set(control_groups("memory", tmp_path))


def test_what_lies_above_the_container_is_not_looked_at(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../other")
    write(tmp_path, "sys/fs/other/cpu.max", "100000 100000")
    assert cpu_quota(tmp_path) is None

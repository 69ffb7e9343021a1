"""Number of threads and choice of the instruction set, from the environment and a made-up machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import qiao_cpu
import torch
from qiao_cpu import native
from qiao_cpu import threads as module

from tests.support.cpu import generator, linear
from tests.support.machines import EVEN_AND_ODD, KUNPENG, PHYTIUM, RYZEN, XEONS, write


def machine(root, groups):
    for name, text in groups.items():
        write(root, name, text)
    return root


@pytest.fixture
def cpus(monkeypatch):
    """A function that sets the processors that the process may use."""
    monkeypatch.delenv(module.VARIABLE, raising=False)

    def allow(some):
        some = range(some) if isinstance(some, int) else some
        monkeypatch.setattr(module, "allowed_cpus", lambda: list(some))

    monkeypatch.delenv(module.PIN_VARIABLE, raising=False)
    return allow


@pytest.mark.parametrize(
    ("layout", "allowed", "count", "reason"),
    [
        (RYZEN, range(24), 11, "12 cores, one left to the front end"),
        (RYZEN, [4, 5, 6, 7], 4, "4 cores"),
        (RYZEN, [0, 12], 1, "1 cores"),
        (XEONS, range(112), 55, "56 cores, one left to the front end"),
        (XEONS, range(28, 56), 27, "28 cores, one left to the front end"),
        (KUNPENG, range(128), 127, "128 cores, one left to the front end"),
        (PHYTIUM, range(4), 2, "2 fast cores of 4"),
        (PHYTIUM, range(2), 2, "2 cores"),
    ],
)
def test_a_thread_a_core_and_one_core_left(tmp_path, cpus, layout, allowed, count, reason):
    cpus(allowed)
    assert module.default_threads(layout.lay_out(tmp_path)) == (count, reason)


@pytest.mark.parametrize(
    ("layout", "allowed", "count", "wanted"),
    [
        (RYZEN, range(24), 11, range(11)),
        (RYZEN, [4, 5, 16, 17], 2, [4, 5]),
        (XEONS, range(112), 28, range(28)),
        (XEONS, [3, 30, 31], 2, [30, 31]),
        (EVEN_AND_ODD, range(64), 16, range(0, 32, 2)),
        (KUNPENG, range(64, 128), 32, range(64, 96)),
        (PHYTIUM, range(4), 2, [2, 3]),
        (PHYTIUM, range(4), 5, []),
    ],
)
def test_pinned_threads_fill_one_node_after_the_other_with_fast_cores(
    tmp_path, cpus, monkeypatch, layout, allowed, count, wanted
):
    cpus(allowed)
    root = layout.lay_out(tmp_path)
    assert module.pinned_cpus(count, root) == ()
    monkeypatch.setenv(module.PIN_VARIABLE, "1")
    assert module.pinned_cpus(count, root) == tuple(wanted)


def test_reports_name_the_nodes_and_where_threads_run(tmp_path, cpus, monkeypatch):
    cpus(range(128))
    root = KUNPENG.lay_out(tmp_path)
    listed = "4 (node 0: 32 processors, node 1: 32 processors, node 2: 32 processors, node 3: 32 processors)"
    assert module.node_facts(127, root) == f"{listed}; threads on nodes 0, 1, 2, 3"
    monkeypatch.setenv(module.PIN_VARIABLE, "1")
    assert module.node_facts(32, root) == f"{listed}; threads pinned to node 0"
    assert module.node_facts(33, root) == f"{listed}; threads pinned to nodes 0, 1"
    monkeypatch.delenv(module.PIN_VARIABLE)
    cpus(range(70, 80))
    assert module.node_facts(9, root) == f"{listed}; threads on node 2"
    assert module.node_facts(1, tmp_path / "nothing") == ""


@pytest.mark.parametrize(
    "groups",
    [
        {"sys/fs/cgroup/cpu.max": "250000 100000\n"},
        {
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "200000 100000",
            "proc/self/cgroup": "0::/a/b\n",
        },
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/y\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "299999",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_never_more_than_the_quota(tmp_path, cpus, monkeypatch, groups):
    cpus(8)
    root = machine(tmp_path, groups)
    assert module.default_threads(root)[0] == 2
    monkeypatch.setenv(module.VARIABLE, "6")
    count, reason = module.default_threads(root)
    assert count == 2 and "no more than 2" in reason


def test_no_limit(tmp_path, cpus):
    cpus(3)
    root = machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"})
    assert module.default_threads(root)[0] == 3


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_wrong_number_of_threads_is_refused(monkeypatch, text):
    monkeypatch.setenv(module.VARIABLE, text)
    with pytest.raises(ValueError, match=module.VARIABLE):
        module.default_threads()


def test_unknown_or_impossible_instruction_sets_are_refused_by_name():
    before = native.isa()
    with pytest.raises(ValueError, match=r"QIAO_CPU_ISA=mmx: unknown.*scalar"):
        native.select("mmx")
    for name in (n for n, score in native.variants().items() if not score):
        with pytest.raises(ValueError, match=f"QIAO_CPU_ISA={name}: this processor cannot"):
            native.select(name)
    assert native.isa() == before


def test_the_variables_are_read_at_start():
    code = "import qiao_cpu; d = qiao_cpu.probe_devices()[0]; print(d.chip, d.score, d.evidence)"
    environment = {**os.environ, "QIAO_CPU_ISA": "scalar", "QIAO_CPU_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("scalar 2 ")
    assert "by QIAO_CPU_ISA" in done.stdout and "1 threads" in done.stdout


def test_calls_from_several_threads_and_from_a_forked_child(threads):
    threads(3)
    made = linear("dense", 200, 300)
    x = torch.randn(5, 300, generator=generator(0))
    want, found = made(x), []

    def work():
        found.extend(made(x) for _ in range(20))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 80 and all(torch.equal(out, want) for out in found)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(made(x), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_hook_sets_what_is_allowed_and_says_why(cpus, threads):
    cpus(4)
    assert qiao_cpu.set_threads(3).startswith("3 threads (3 asked for")
    assert native.threads() == 3
    assert "no more than 4 are allowed" in qiao_cpu.set_threads(9)
    assert native.threads() == 4
    with pytest.raises(ValueError, match="at least 1"):
        qiao_cpu.set_threads(0)
    assert native.threads() == 4


def test_advice_is_given_where_several_memory_nodes_are_used(tmp_path, cpus):
    cpus(8)
    assert module.node_advice(tmp_path) == ""
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1,4")
    write(tmp_path, "sys/devices/system/node/node10/cpulist", "2-3,5-7")
    assert "2 memory nodes (node 0: 3 processors, node 10: 5 processors)" in module.node_advice(tmp_path)
    cpus(2)
    assert module.node_advice(tmp_path) == "", "the process may run on one of them only"


@pytest.mark.parametrize("scheme", ["dense", "w8a16", "w8a8", "w4a16"])
def test_packing_does_not_depend_on_the_number_of_threads(scheme):
    """Odd sizes, so that the last strip and the last block are not full, and rows enough for several strips each."""
    before, packed = native.threads(), []
    try:
        for count in (1, 2, 5):
            native.set_threads(count)
            packed.append(linear(scheme, 261, 96, group=-1 if scheme in ("dense", "w8a8") else 32).packed.data)
    finally:
        native.set_threads(before)
    for other in packed[1:]:
        assert packed[0].keys() == other.keys()
        for name, tensor in packed[0].items():
            assert tensor.shape == other[name].shape
            assert tensor.flatten().view(torch.uint8).equal(other[name].flatten().view(torch.uint8))

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


def machine(root, groups, siblings=None):
    for name, text in groups.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for cpu, text in (siblings or {}).items():
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def cpus(monkeypatch):
    """A function that sets the processors that the process may use."""
    monkeypatch.delenv(module.VARIABLE, raising=False)
    return lambda n: monkeypatch.setattr(module, "allowed_cpus", lambda: list(range(n)))


def test_one_thread_for_each_physical_core_and_one_core_left(tmp_path, cpus):
    cpus(16)
    root = machine(tmp_path, {}, {i: f"{i % 8},{i % 8 + 8}" for i in range(16)})
    assert module.default_threads(root)[0] == 7
    cpus(4)
    assert module.default_threads(root)[0] == 4


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


def node(root, number, cpus):
    folder = root / f"sys/devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpus)


def test_memory_nodes_are_read_and_advice_is_given_where_several_are_used(tmp_path, cpus):
    cpus(8)
    assert module.nodes(tmp_path) == {} and module.node_advice(tmp_path) == ""
    node(tmp_path, 0, "0-1,4\n")
    node(tmp_path, 10, "2-3,5-7\n")
    node(tmp_path, 2, "\n")
    assert module.nodes(tmp_path) == {0: [0, 1, 4], 10: [2, 3, 5, 6, 7]}
    assert "2 memory nodes (node 0: 3 processors, node 10: 5 processors)" in module.node_advice(tmp_path)
    cpus(2)
    assert module.node_advice(tmp_path) == "", "the process may run on one of them only"


@pytest.mark.parametrize("text", ["-1", "a", "1,b"])
def test_a_list_of_processors_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="invalid literal"):
        module.parse_cpus(text)

"""What the reference says about the machine."""

import psutil
import pytest
import qiao_reference as reference
import torch
from qiao_reference.memory import free_and_total

GIB = 1 << 30


def files(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def limited(tmp_path, cgroup):
    files(tmp_path / "proc/self", cgroup=cgroup)
    return free_and_total(tmp_path / "proc", tmp_path / "sys")


def test_version_2_takes_the_tightest_group_on_the_way_up(tmp_path):
    sys = tmp_path / "sys"
    files(sys / "a", memory__max=1 * GIB, memory__current=GIB // 2, memory__stat=f"inactive_file {GIB // 4}\nfile 1")
    files(sys / "a/b", memory__max="max", memory__current=7)
    got = limited(tmp_path, "0::/a/b")
    assert (got.total, got.free) == (GIB, GIB - GIB // 4)


def test_version_2_with_the_word_max_everywhere_is_the_host(tmp_path):
    files(tmp_path / "sys", memory__max="max", memory__current=5)
    got = limited(tmp_path, "0::/")
    assert got.total == free_and_total(tmp_path / "none", tmp_path / "none").total
    assert 0 < got.free <= got.total


def test_version_1_and_its_number_for_no_limit(tmp_path):
    memory = tmp_path / "sys/memory"
    files(memory / "box", memory__limit_in_bytes=GIB // 2, memory__usage_in_bytes=GIB // 8)
    files(memory, memory__limit_in_bytes=9223372036854771712)
    got = limited(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/box\n1:name=systemd:/y")
    assert (got.total, got.free) == (GIB // 2, GIB // 2 - GIB // 8)


def test_a_container_that_hides_its_own_path_shows_the_root(tmp_path):
    files(tmp_path / "sys", memory__max=GIB, memory__current=0)
    assert limited(tmp_path, "0::/not/visible/here").total == GIB


def test_no_control_groups_at_all(tmp_path):
    assert free_and_total(tmp_path / "none", tmp_path / "none").total <= psutil.virtual_memory().total


def test_process_limits_count(monkeypatch):
    import resource

    vms = psutil.Process().memory_info().vms
    monkeypatch.setattr(
        resource, "getrlimit", lambda what: (vms + GIB // 4, -1) if what == resource.RLIMIT_AS else (-1, -1)
    )
    got = free_and_total()
    assert got.total <= vms + GIB // 4 and got.free <= GIB // 4 + (64 << 20)


def test_probe_says_what_it_saw():
    (info,) = reference.probe_devices()
    assert (info.name, info.torch_device, info.score) == ("reference:0", "cpu", 1)
    assert torch.__version__ in info.evidence and info.memory_bytes > 0
    assert set(reference.capabilities(info.chip).dtypes) == {"float32", "bfloat16", "float16"}


def test_the_rest_of_the_family():
    assert 0 <= reference.utilization("cpu") <= 1
    assert reference.synchronize("cpu") is None
    assert torch.distributed.is_gloo_available() and reference.collective_backend() == "gloo"
    x = torch.ones(2)
    replay = reference.capture(lambda x: (x * 2, [x + 1]), (x,), "cpu")
    first, _ = replay()
    x.fill_(3)
    double, (next_one,) = replay()
    assert double is first and (double.tolist(), next_one.tolist()) == ([6.0, 6.0], [4.0, 4.0])


def test_memory_is_at_least_what_torch_can_still_take():
    info = reference.memory_info("cpu")
    assert 0 < info.free <= info.total
    assert pytest.approx(info.total) == reference.probe_devices()[0].memory_bytes

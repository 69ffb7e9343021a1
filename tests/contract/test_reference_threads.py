"""Torch's threads, by number, by default and within made-up control groups."""

from __future__ import annotations

import pytest
import qiao_reference
import torch
from qiao_reference import threads as module


@pytest.fixture
def torch_threads(monkeypatch):
    """Records what torch is told, and says that it would take 6 threads."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    return told


def test_torch_gets_the_number_its_own_default_or_what_is_allowed(monkeypatch, torch_threads):
    monkeypatch.setattr(module, "allowed", lambda: 4)
    assert qiao_reference.set_threads(3) == "3 torch threads"
    assert qiao_reference.set_threads(None) == "4 torch threads; no more than 4 are allowed"
    assert qiao_reference.set_threads(9) == "4 torch threads; no more than 4 are allowed"
    monkeypatch.setattr(module, "allowed", lambda: 8)
    assert qiao_reference.set_threads(None) == "6 torch threads"
    assert torch_threads == [3, 4, 4, 6]
    with pytest.raises(ValueError, match="at least 1"):
        qiao_reference.set_threads(0)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        ({"sys/fs/cgroup/a/cpu.max": "50000 100000", "proc/self/cgroup": "0::/a/b\n"}, 0.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/y\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
    ],
)
def test_the_quota_of_either_version_is_found(tmp_path, files, expected):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert module.quota(tmp_path) == expected
    assert module.allowed(tmp_path) >= 1
    assert expected is None or module.allowed(tmp_path) <= max(1, int(expected))

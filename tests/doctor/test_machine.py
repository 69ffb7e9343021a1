"""CPU facts read from trees as Linux lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from qiao.observability.machine import read_cpu
from qiao.processors import cpu_quota


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


X86 = """processor\t: {i}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu sse4_2 avx f16c fma avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16

"""

KUNPENG = """processor\t: {i}
BogoMIPS\t: 200.00
Features\t: fp asimd evtstrm aes sha1 sha2 crc32 atomics fphp asimdhp cpuid jscvt fcma dcpop asimddp asimdfhm
CPU implementer\t: 0x48
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd01

"""

PHYTIUM = "processor\t: 0\nFeatures\t: fp asimd crc32\nCPU implementer\t: 0x70\nCPU part\t: 0x663\n"
LOONGSON = "processor\t: 0\nModel Name\t: Loongson-3A6000\nFeatures\t: cpucfg lam ual fpu lsx lasx crc32\n"
RISCV = "processor\t: 0\nhart\t: 0\nisa\t\t: rv64imafdcv_zicsr_zba\nuarch\t: thead,c920\n"


def test_x86(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "".join(X86.format(i=i) for i in range(4)))
    cpu = read_cpu(tmp_path, "x86_64", usable=3)
    assert (cpu.kind, cpu.cores, cpu.usable, cpu.quota) == ("Intel(R) Xeon(R) Platinum 8480C", 4, 3, None)
    assert {"avx2", "avx512_vnni", "amx_int8"} <= set(cpu.features)
    assert "fpu" not in cpu.features
    assert cpu.vector


@pytest.mark.parametrize(
    ("text", "machine", "kind", "feature"),
    [
        (KUNPENG.format(i=0), "aarch64", "HiSilicon Kunpeng 920 (TaiShan v110)", "asimddp"),
        (PHYTIUM, "aarch64", "Phytium FTC663", "asimd"),
        (LOONGSON, "loongarch64", "Loongson-3A6000", "lasx"),
        (RISCV, "riscv64", "thead,c920", "v"),
        (PHYTIUM.replace("0x663", "0x999"), "aarch64", "Phytium 0x999", "asimd"),
    ],
)
def test_other_architectures(tmp_path: Path, text: str, machine: str, kind: str, feature: str) -> None:
    write(tmp_path, "proc/cpuinfo", text)
    cpu = read_cpu(tmp_path, machine)
    assert cpu.kind == kind
    assert feature in cpu.features
    assert cpu.vector


def test_a_feature_of_some_cores_only_does_not_count(tmp_path: Path) -> None:
    little = PHYTIUM.replace("processor\t: 0", "processor\t: 1").replace("asimd crc32", "crc32")
    write(tmp_path, "proc/cpuinfo", PHYTIUM + "\n" + little)
    assert read_cpu(tmp_path, "aarch64").features == ()


def test_no_vector_extension(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor: 0\nmodel name: QEMU Virtual CPU\nflags: fpu sse4_2\n")
    assert not read_cpu(tmp_path, "x86_64").vector


def test_unreadable_machine_still_gives_an_answer(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path, "sparc64")
    assert cpu.cores >= 1
    assert cpu.kind
    assert cpu.features == ()


def test_quota_of_a_container_that_sees_its_own_group_only(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_the_tightest_quota_of_the_parents_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a.slice/b.scope\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/b.scope/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/cpu.max", "400000 100000\n")
    assert cpu_quota(tmp_path) == 4.0


def test_quota_of_version_one(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "50000")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    write(tmp_path, "proc/cpuinfo", X86.format(i=0))
    assert cpu_quota(tmp_path) == 0.5
    assert read_cpu(tmp_path, "x86_64", usable=8).effective == 0.5


def test_no_quota(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert cpu_quota(tmp_path) is None

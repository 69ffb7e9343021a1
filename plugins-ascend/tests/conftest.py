"""The stand-in, made once, and code that runs on it in processes of its own: torch has one slot for a backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forks import Forks

HERE = Path(__file__).resolve().parents[1]
SITE = HERE / ".stand_in" / "site"
Runner = Callable[..., str]

PRELOAD = """
import pytest, torch, torch_npu
import qiao_ascend, qiao_reference
from qiao.contract import cases
from qiao.models import describe
from qiao.registry import backend_of
from qiao_conformance import captured, kit, reality
from qiao_conformance.target import Target
"""


def make(*arguments: str) -> None:
    """Run ``make.py``; skips where torch-npu or a compiler cannot be had."""
    command = [sys.executable, str(HERE / "stand_in" / "make.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"no stand-in: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="session")
def stand_in() -> Path:
    """The folder that ``make.py`` made."""
    make()
    return HERE / ".stand_in"


def environment(folder: Path, soc: str, **more: str) -> dict[str, str]:
    """As ``conformance.toml`` has it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QIAO_", "CANN_", "ASCEND_"))}
    install = folder / "install"
    paths = [SITE, HERE / "stand_in", HERE / "src", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CANN_STUB_SOC": soc,
        "QIAO_ASCEND_STAND_IN": str(folder),
        "ASCEND_HOME_PATH": str(install / "cann"),
        "ASCEND_OPP_PATH": str(install / "cann" / "opp"),
        "ATB_HOME_PATH": str(install / "nnal"),
        "ASCEND_DRIVER_PATH": str(install / "driver"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def runner(forks: Forks) -> Runner:
    """``run(code, soc, **environment)``: what the code printed; its failure is the test's."""

    def call(code: str, soc: str = "Ascend910B3", **more: str) -> str:
        done = forks.run(code, {"CANN_STUB_SOC": soc, **more})
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    return call


@pytest.fixture(scope="session")
def run(stand_in: Path) -> Iterator[Runner]:
    """Code on the stand-in; see ``runner``."""
    with Forks(PRELOAD, environment(stand_in, "Ascend910B3")) as forks:
        yield runner(forks)


@pytest.fixture(scope="module")
def run_lacking(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """The same over an older CANN without some kernels, and without NNAL, which has ATB."""
    folder = tmp_path_factory.mktemp("lacking")
    without = [x for kernel in LACKING for x in ("--without", kernel)]
    make("--folder", str(folder), "--site", str(SITE), *without)
    (folder / "lib" / "libatb.so").unlink()
    with Forks(PRELOAD, environment(folder, "Ascend910B3")) as forks:
        yield runner(forks)


LACKING = ("aclnnAddRmsNorm", "aclnnSwiGlu", "aclnnFusedInferAttentionScoreV2")

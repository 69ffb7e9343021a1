"""Builds the workspace's wheels and installs them where nothing of the source tree can be seen."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from tests.support.source import ROOT

DISTRIBUTIONS = {
    "qiao": ROOT,
    "qiao-conformance": ROOT / "plugins" / "conformance",
    "qiao-triton": ROOT / "plugins" / "triton",
    "qiao-ascend": ROOT / "plugins-ascend",
    "qiao-cambricon": ROOT / "plugins-cambricon",
    "qiao-dcu": ROOT / "plugins-dcu",
    "qiao-cuda": ROOT / "plugins-cuda",
}
"""Distribution name -> its folder."""

if importlib.util.find_spec("scikit_build_core") and any(shutil.which(name) for name in ("c++", "g++", "clang++")):
    DISTRIBUTIONS["qiao-cpu"] = ROOT / "plugins" / "cpu"

VENDORS = ("qiao-ascend", "qiao-cambricon", "qiao-dcu", "qiao-cuda")


@dataclass(frozen=True)
class Wheel:
    """One built wheel."""

    path: Path

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def text(self, ending: str) -> str:
        """The one member whose name ends so, or an empty string."""
        with zipfile.ZipFile(self.path) as archive:
            found = [name for name in archive.namelist() if name.endswith(ending)]
            return archive.read(found[0]).decode() if found else ""

    def metadata(self) -> dict[str, list[str]]:
        message = Parser().parsestr(self.text(".dist-info/METADATA"))
        return {key: message.get_all(key) or [] for key in set(message.keys())}


def build_wheel(source: Path, target: Path) -> Wheel:
    """``pip wheel`` without its download steps."""
    before = set(target.glob("*.whl"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target), str(source))
    (made,) = set(target.glob("*.whl")) - before
    return Wheel(made)


def pip(*arguments: str) -> None:
    """Run pip of this environment; its output becomes the failure's text."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr


class Environment:
    """A new virtual environment that has the third-party packages of this one, linked, and nothing of Qiao."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
        for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(source).iterdir():
                ours = entry.name.lower().startswith(("qiao", "_qiao", "__editable__"))
                if not ours and not (self.site / entry.name).exists():
                    (self.site / entry.name).symlink_to(entry)

    def install(self, wheels: list[Wheel]) -> None:
        """Install ``wheels`` and nothing else."""
        pip("--python", str(self.bin / "python"), "install", "--no-deps", "--no-index", *(str(w.path) for w in wheels))

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's commands in an empty folder, without this process's Python settings."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QIAO_", "COV_"))}
        env |= {"OMP_NUM_THREADS": "1", "PATH": f"{self.bin}{os.pathsep}{env['PATH']}"}
        argv = [str(self.bin / command[0]), *command[1:]]
        result = subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=120)
        assert not check or result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result

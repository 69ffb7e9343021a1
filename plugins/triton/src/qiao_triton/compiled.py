"""Compiles kernels for architectures that are not here, and holds what they take against bounds.

``python -m qiao_triton.compiled`` compiles all of ``builds`` for all of ``COMPILED``; ``--json`` gives what each takes.
The compiler checks none of the bounds: a program that asks for more shared memory than there is compiles as well.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qiao_triton.architectures import ARCHITECTURES, COMPILED, Architecture
from qiao_triton.builds import Build, builds, dtypes_of

MOST_REGISTERS = 255
"""Of a thread on NVIDIA, where the hardware has no more."""

MOST_VECTOR_REGISTERS = {"gfx906": 256, "gfx90a": 512, "gfx942": 512}
"""Of a lane, accumulation registers included where they are one file."""

MOST_SPILLED = {("gfx906", "float32"): 48}
"""Bytes of local memory of a thread (NVIDIA) and vector registers spilled (AMD); none but where it is said here."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one compiled kernel takes, and ``faults``, the bounds that it breaks. ``seconds`` to compile it.

    ``bounds`` are those of ``shared`` (bytes), ``registers`` (of a lane) and ``spilled`` (as ``MOST_SPILLED`` counts).
    """

    architecture: str
    hook: str
    dtype: str
    label: str
    kernel: str
    shared: int
    registers: int
    spilled: int
    bounds: tuple[int, int, int]
    seconds: float
    faults: tuple[str, ...]


_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ALIGNED = [["tt.divisibility", 16]]


def source(build: Build) -> ASTSource:
    """As Triton's own launcher specialises: tensors are aligned, 1 is a constant, multiples of 16 are known as such."""
    launch = build.launch
    signature, constants, attributes = {}, dict(launch.constants), {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(place,)] = _TYPES[value.dtype], _ALIGNED
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            attributes |= {(place,): _ALIGNED} if value % 16 == 0 else {}
    return ASTSource(launch.kernel, signature, constants, attributes)


def _target(arch: Architecture) -> GPUTarget:
    if arch.family == "hip":
        return GPUTarget("hip", arch.name, arch.lanes)
    return GPUTarget("cuda", int(arch.name.removeprefix("sm_")), arch.lanes)


def _cuda_usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its local memory, by the cuobjdump that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)  # noqa: S603
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2]) + int(found[3])


def _hip_usage(assembly: str) -> tuple[int, int]:
    def largest(name: str) -> int:
        return max((int(x) for x in re.findall(rf"\.{name}:\s+(\d+)", assembly)), default=0)

    # scalar registers spill into vector ones, not to memory
    return largest("vgpr_count"), largest("vgpr_spill_count")


def bounds_of(arch: Architecture, dtype: str) -> tuple[int, int, int]:
    """Of shared memory, registers and spills, for kernels over activations of ``dtype``."""
    most = MOST_VECTOR_REGISTERS.get(arch.name, 256) if arch.family == "hip" else MOST_REGISTERS
    return arch.shared, most, MOST_SPILLED.get((arch.name, dtype), 0)


def compile_one(arch: Architecture, build: Build) -> Taken:
    """Compile ``build`` for ``arch``. A kernel that does not compile is a fault too."""
    start, launch = time.monotonic(), build.launch
    named = (arch.name, build.hook, build.dtype, build.label, launch.kernel.__name__)
    bounds = bounds_of(arch, build.dtype)
    try:
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        made: Any = triton.compile(source(build), target=_target(arch), options=options)
    except Exception as error:  # whatever the compiler raises is what is wrong with the kernel
        return Taken(*named, 0, 0, 0, bounds, time.monotonic() - start, (f"{type(error).__name__}: {error}"[:500],))
    hip = arch.family == "hip"
    registers, spilled = _hip_usage(made.asm["amdgcn"]) if hip else _cuda_usage(made.asm["cubin"])
    taken = (made.metadata.shared, registers, spilled)
    faults = [
        f"{what} {value} above {bound}"
        for what, value, bound in zip(("shared memory", "registers", "spilled"), taken, bounds, strict=True)
        if value > bound
    ]
    return Taken(*named, *taken, bounds, round(time.monotonic() - start, 2), tuple(faults))


def _some(name: str, dtype: str, share: int, shares: int, only: str) -> list[Taken]:
    arch = ARCHITECTURES[name]
    chosen = [b for b in builds(arch, dtype) if only in f"{b.hook} {b.label}"]
    return [compile_one(arch, build) for build in chosen[share::shares]]


def compile_all(names: tuple[str, ...], processes: int, only: str = "", every: int = 1) -> Iterator[Taken]:
    """Compile for the architectures ``names``; of the kernels every ``every``-th, in several processes."""
    with ProcessPoolExecutor(processes) as pool:
        jobs = [
            pool.submit(_some, name, dtype, share, max(4, every), only)
            for name in names
            for dtype in dtypes_of(ARCHITECTURES[name])
            for share in range(1 if every > 1 else 4)
        ]
        for job in jobs:
            yield from job.result()


def main() -> int:
    """0 where every kernel compiles within the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", default=list(COMPILED))
    parser.add_argument("--only", default="", help="part of a hook's name or of a case's")
    parser.add_argument("--every", type=int, default=1, help="compile a sample: each so many-th kernel")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found, start = [], time.monotonic()
    for one in compile_all(tuple(options.architectures), options.processes, options.only, options.every):
        found.append(one)
        for fault in one.faults:
            print(f"{one.architecture} {one.hook} {one.dtype} {one.label}: {fault}", file=sys.stderr)
    if options.json:
        json.dump([asdict(one) for one in found], sys.stdout, indent=1)
    bad = sum(1 for one in found if one.faults)
    print(f"{len(found)} kernels, {bad} beyond bounds, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())

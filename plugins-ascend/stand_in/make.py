"""Makes what the stand-in needs, in ``.stand_in`` beside ``pyproject.toml``: the real torch-npu and CANN's libraries.

``site``     torch-npu from the package index, without its dependencies: it takes this interpreter's torch
``lib``      for every library of CANN that torch-npu wants, one that has all symbols: those of ``fake_acl.c``, and for
             the rest functions that return 0
``install``  the folders and version files that CANN, NNAL and the driver leave

Needs an x86-64 or aarch64 Linux, gcc, nm and readelf. Does nothing where nothing has changed. ``--without aclnnSwiGlu``
leaves a kernel out, as an older CANN would; with ``--folder`` it is made elsewhere.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / ".stand_in"
TORCH_NPU = "2.13.0"

KERNEL = re.compile(rb"\0(aclnn[A-Z][A-Za-z0-9]{3,})(?=\0)")
"""Names that torch_npu looks up while it runs. Other such names are left out: an absent one says that a feature is."""

_WEAK = re.compile(r"^(_ITM_|__gmon_start__|_ZTH|_?_?Py)")
_SYSTEM = re.compile(r"^(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux|libtorch|libc10|libshm|libgomp)")
_LDCONFIG = re.compile(r"^\s*((?:lib(?:c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-\S+?)\.so\.\d+) .*=> (\S+)", re.M)

_LOOKED_FOR = {"libopapi.so", "libnnopbase.so"}
"""Libraries that torch_npu opens by name while it runs; the second where a graph asks for workspace."""

_INSTALLED = {
    "cann/opp/README": "Operators would be here.\n",
    "cann/runtime/README": "The runtime would be here.\n",
    "cann/compiler/README": "The compiler would be here.\n",
    "cann/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=stand-in\n",
    "nnal/version.info": "Ascend-cann-atb : stand-in\n",
    "driver/version.info": "Version=stand-in\n",
}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - our own


def install(site: Path) -> None:
    """Put torch-npu into ``site`` unless it is there. Raises ``SystemExit`` saying what is wrong."""
    if (site / f"torch_npu-{TORCH_NPU}.dist-info").exists():
        return
    torch = importlib.util.find_spec("torch")
    if torch is None:
        raise SystemExit("torch is not installed")
    version = re.search(r"__version__ = '([\d.]+)", Path(torch.origin).with_name("version.py").read_text())
    if version is None or version[1] != TORCH_NPU:
        raise SystemExit(f"torch-npu {TORCH_NPU} needs torch {TORCH_NPU}, this is {version and version[1]}")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--target", str(site), f"torch-npu=={TORCH_NPU}"], check=False)  # noqa: S603
    if done.returncode != 0:
        raise SystemExit(f"torch-npu {TORCH_NPU} could not be installed from the package index")


def _symbols(library: str, which: str) -> set[tuple[str, str]]:
    lines = (line.split() for line in _run("nm", "-D", which, library).splitlines())
    return {(parts[-1].split("@")[0], parts[-2]) for parts in lines if len(parts) >= 2}


def _system_libraries() -> list[str]:
    return [path for _, path in _LDCONFIG.findall(_run("ldconfig", "-p")) if "/lib32" not in path]


def wanted(package: Path, torch: Path) -> tuple[set[str], set[str]]:
    """(library names, symbols) that torch_npu in ``package`` needs and neither it, ``torch`` nor the system has."""
    ours = sorted(glob.glob(f"{package}/**/*.so", recursive=True))
    names = {os.path.basename(path) for path in ours}
    defined = set()
    for path in [*ours, *glob.glob(f"{torch}/lib/*.so*"), *_system_libraries()]:
        defined |= {name for name, _ in _symbols(path, "--defined-only")}
    libraries, missing = set(), set()
    for path in ours:
        needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", path))
        libraries |= {name for name in needed if name not in names and not _SYSTEM.match(name)}
        undefined = {name for name, kind in _symbols(path, "--undefined-only") if kind == "U"}
        missing |= {name for name in undefined - defined if not _WEAK.match(name)}
    return libraries, missing


def kernels(package: Path, without: list[str]) -> set[str]:
    """The names of all kernels that torch_npu knows, each with the one that asks for its workspace."""
    blob = (package / "lib" / "libtorch_npu.so").read_bytes()
    names = {match[1].decode() for match in KERNEL.finditer(blob)}
    plain = {name.removesuffix("GetWorkspaceSize") for name in names} - set(without)
    return plain | {f"{name}GetWorkspaceSize" for name in plain}


def _source(symbols: set[str], aclnn: set[str]) -> str:
    """C for ``symbols``: kernels are noted and may be told to fail, ATB's makers hand out the fake object."""
    lines = ["long cann_stub_hit(const char *);", "extern void *cann_stub_object;"]
    for i, name in enumerate(sorted(symbols)):
        if name.startswith("_ZN3atb15CreateOperation"):
            short = re.sub(r"^\d+|Param$", "", re.sub(r".*?infer(\d+\w+?Param).*", r"\1", name))
            body = f'*out = &cann_stub_object; return cann_stub_hit("atb:{short}");'
            arguments = "const void *p, void **out"
        elif name.startswith("_ZN3atb13CreateContext"):
            arguments, body = "void **out", "*out = &cann_stub_object; return 0;"
        else:
            quiet = name in aclnn and not name.endswith("GetWorkspaceSize")
            arguments, body = "void", "return 0;" if quiet else f'return cann_stub_hit("{name}");'
        lines.append(f'long stub_{i}({arguments}) __asm__("{name}"); long stub_{i}({arguments}) {{ {body} }}')
    return "\n".join(lines) + "\n"


def build(package: Path, torch: Path, folder: Path, without: list[str]) -> None:
    """Compile the libraries into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries, missing = wanted(package, torch)
    aclnn = kernels(package, without)
    fake = folder / "fake_acl.o"
    _run("gcc", "-O1", "-fPIC", "-Wall", "-c", str(HERE / "fake_acl.c"), "-o", str(fake))
    have = {parts[-1] for parts in map(str.split, _run("nm", "--defined-only", str(fake)).splitlines())}
    source = folder / "rest.c"
    source.write_text(_source((missing | aclnn) - have, aclnn), encoding="utf-8")
    core = folder / "libcann_stub.so"
    shared = ["gcc", "-O1", "-w", "-fPIC", "-shared"]
    _run(*shared, f"-Wl,-soname,{core.name}", "-o", str(core), str(source), str(fake), "-lpthread")
    for name in sorted(libraries | _LOOKED_FOR):
        options = ["-nostartfiles", "-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
        _run(*shared, *options, "-o", str(folder / name), "-x", "c", "/dev/null", f"-L{folder}", "-lcann_stub")


def make(folder: Path, site: Path, without: list[str]) -> None:
    """See the module; raises ``SystemExit`` saying what is missing."""
    install(site)
    torch = importlib.util.find_spec("torch")
    key = hashlib.sha256()
    for part in (HERE / "fake_acl.c", Path(__file__)):
        key.update(part.read_bytes())
    key.update(f"{TORCH_NPU} {torch.origin} {without}".encode())
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key.hexdigest():
        return
    try:
        build(site / "torch_npu", Path(torch.origin).parent, folder / "lib", without)
    except FileNotFoundError as error:
        raise SystemExit(f"there is no {error.filename}: install gcc and binutils") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"the stand-in libraries did not build: {error.stderr}") from error
    for name, text in _INSTALLED.items():
        file = folder / "install" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    stamp.write_text(key.hexdigest(), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes the stand-in for CANN.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--site", type=Path, default=FOLDER / "site", help="where torch-npu is or shall be")
    parser.add_argument("--without", action="append", default=[], metavar="KERNEL")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds it made
        make(folder, options.site.resolve(), options.without)


if __name__ == "__main__":
    main()

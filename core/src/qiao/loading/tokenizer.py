"""Tokenizers, without remote code wherever the files allow it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qiao.errors import ModelError
from qiao.loading.config import read_json
from qiao.loading.sources import ModelFiles, resolve
from qiao.loading.text_tokenizer import TextTokenizer, folder_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    source: ModelFiles | str | Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of whatever ``resolve`` finds for a string, as transformers' class.

    A GGUF file carries its own. Checkpoints whose tokenizer is Python code (ChatGLM, InternLM2, Baichuan2) are read
    from their SentencePiece file instead. Raises ``ModelError`` with a remedy.
    """
    files = source if isinstance(source, ModelFiles) else resolve(source, revision, download_dir)
    found = _without_transformers(files, trust_remote_code)
    return _by_transformers(files.folder, trust_remote_code) if found is None else found.to_transformers()


def load_text_tokenizer(files: ModelFiles, trust_remote_code: bool = False) -> TextTokenizer | PreTrainedTokenizerBase:
    """As ``load_tokenizer``, by the ``tokenizers`` library alone wherever the files allow it."""
    found = _without_transformers(files, trust_remote_code)
    if found is None and files.gguf is None:
        found = folder_tokenizer(files.folder)
    return _by_transformers(files.folder, trust_remote_code) if found is None else found


def _without_transformers(files: ModelFiles, trust_remote_code: bool) -> TextTokenizer | None:
    """What is built here because transformers would cut text wrongly, or would have to run code."""
    if files.gguf is not None:
        from qiao.loading.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(files.header)
    config = _config(files.folder)
    needs_code = "AutoTokenizer" in config.get("auto_map", {}) and not (files.folder / "tokenizer.json").is_file()
    if not needs_code or trust_remote_code:
        return None
    from qiao.loading.plain_tokenizer import plain_tokenizer

    return plain_tokenizer(files.folder, config)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _by_transformers(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase  # here, because the first imports torch

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        held = ", ".join(sorted(f.name for f in folder.glob("*token*"))) or "no tokenizer files"
        raise ModelError(
            f"{folder}: the tokenizer could not be loaded ({type(error).__name__}: {str(error).strip()[:300]}; "
            f"found: {held}). Give another one with --tokenizer."
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer

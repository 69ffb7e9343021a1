"""Tokenizers, without remote code wherever the files allow it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qiao.errors import ModelError
from qiao.loading.config import read_json
from qiao.loading.sources import ModelFiles, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    source: ModelFiles | str | Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of whatever ``resolve`` finds for a string.

    A GGUF file carries its own. Checkpoints whose tokenizer is Python code (ChatGLM, InternLM2, Baichuan2) are read
    from their SentencePiece file instead. Raises ``ModelError`` with a remedy.
    """
    files = source if isinstance(source, ModelFiles) else resolve(source, revision, download_dir)
    if files.gguf is not None:
        from qiao.loading.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(files.gguf)
    return _from_folder(files.folder, trust_remote_code)


def _from_folder(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase  # here, because the first imports torch

    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    needs_code = "AutoTokenizer" in config.get("auto_map", {}) and not (folder / "tokenizer.json").is_file()
    if needs_code and not trust_remote_code:
        from qiao.loading.plain_tokenizer import plain_tokenizer

        return plain_tokenizer(folder, config)
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

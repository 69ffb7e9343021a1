"""A server with adapters: listed, chosen by ``model``, loaded and unloaded under requests, back after a crash."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from qiao import LLM, SamplingParams
from qiao.lora.request import RUNTIME_VARIABLES

from tests.support.adapters import linear_modules, merge, write_adapter
from tests.support.checkpoints import rand_checkpoint
from tests.support.server import RunningServer, server

PROMPT = [60 + i for i in range(9)]
ADAPTERS = ("one", "two", "three")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base checkpoint and three adapters."""
    folder = tmp_path_factory.mktemp("lora-server")
    base = rand_checkpoint(folder / "base")
    made = {"": base}
    for seed, name in enumerate(ADAPTERS):
        made[name] = write_adapter(folder / name, linear_modules(base), rank=2 + seed, seed=seed)
    return made


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """Greedy tokens of the base and of each merged checkpoint."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = {}
    for name, folder in folders.items():
        model = merge(folders[""], folder, folder.parent / f"merged-{name}") if name else folder
        llm = LLM(str(model), device="cpu", num_gpu_blocks_override=8, threads=1)
        found[name] = list(llm.generate(PROMPT, params)[0].outputs[0].token_ids)
    assert len({str(tokens) for tokens in found.values()}) == 4
    return found


@pytest.fixture(scope="module")
def running(folders: dict[str, Path]) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME_VARIABLES[1], "True")
        two = f'{{"name": "two", "path": "{folders["two"]}", "base_model_name": "parent"}}'
        modules = ("--lora-modules", f"one={folders['one']}", two)
        small = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8", "--threads", "1")
        with server(folders[""], "--enable-lora", *modules, "--max-loras", "2", "--check-integrity", *small) as one:
            yield one


def complete(server: RunningServer, model: str, count: int = 8) -> list[int]:
    """Greedy tokens after ``PROMPT``."""
    made = server.openai().completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=count,
        temperature=0,
        logprobs=0,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    assert made.model == model
    return [int(token.removeprefix("token_id:")) for token in made.choices[0].logprobs.tokens]


def names(server: RunningServer) -> list[str]:
    return [card.id for card in server.openai().models.list().data]


def change(server: RunningServer, what: str, **body: object) -> tuple[int, str]:
    answer = server.http().post(f"/v1/{what}_lora_adapter", json=body)
    return answer.status_code, answer.text


def test_listed_with_their_parent(running: RunningServer, folders: dict[str, Path]) -> None:
    cards = {card.id: card for card in running.openai().models.list().data}
    assert list(cards) == ["M", "org/M", "one", "two"]
    assert (cards["M"].parent, cards["one"].parent, cards["two"].parent) == (None, "M", "parent")
    assert (cards["M"].root, cards["one"].root) == (str(folders[""]), str(folders["one"]))
    assert running.openai().models.retrieve("two").root == str(folders["two"])


def test_each_request_gets_the_adapter_that_it_names(running: RunningServer, expected: dict[str, list[int]]) -> None:
    wanted = ["one", "M", "two", "one", "two", "org/M"]
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(lambda name: complete(running, name), wanted))
    assert answers == [expected["" if "M" in name else name] for name in wanted]
    chat = running.openai().chat.completions.create(
        model="one", messages=[{"role": "user", "content": "x"}], max_tokens=1
    )
    assert chat.model == "one"


def test_load_and_unload_under_requests(
    running: RunningServer, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    assert change(running, "load", lora_name="three", lora_path=str(folders["three"]))[0] == 200
    assert complete(running, "three") == expected["three"]
    long: list[list[int]] = []
    thread = threading.Thread(target=lambda: long.append(complete(running, "three", 400)))
    thread.start()
    using = '{engine="0",max_lora="2",model_name="M",running_lora_adapters="three",waiting_lora_adapters=""}'
    running.wait_for(lambda: f"vllm:lora_requests_info{using}" in running.http().get("/metrics").text)
    status, text = change(running, "unload", lora_name="three")
    assert (status, text) == (200, "Success: LoRA adapter 'three' removed successfully.")
    assert thread.is_alive(), "the answer ended before its adapter was unloaded"
    assert running.http().post("/v1/completions", json={"model": "three", "prompt": "x"}).status_code == 404
    assert change(running, "load", lora_name="three", lora_path=str(folders["two"]))[0] == 200
    assert complete(running, "three") == expected["two"]
    thread.join()
    assert long[0][:8] == expected["three"]
    assert len(long[0]) == 400
    assert change(running, "load", lora_name="three", lora_path=str(folders["three"]), load_inplace=True)[0] == 200
    assert complete(running, "three") == expected["three"]
    assert change(running, "unload", lora_name="three")[0] == 200


def test_what_is_refused(running: RunningServer, folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(what: str, **body: object) -> tuple[int, str]:
        answer = running.http().post(f"/v1/{what}_lora_adapter", json=body)
        return answer.status_code, answer.json()["error"]["message"]

    path = str(folders["three"])
    assert refused("load", lora_name="one", lora_path=path) == (
        400,
        "lora_name: the adapter 'one' has been loaded already; unload it first, or set load_inplace",
    )
    assert refused("load", lora_name="M", lora_path=path)[0] == 400
    assert refused("load", lora_name="", lora_path=path)[0] == 400
    assert refused("load", lora_path=path)[0] == 400
    wide = write_adapter(tmp_path / "wide", linear_modules(folders[""]), rank=32)
    status, message = refused("load", lora_name="wide", lora_path=str(wide))
    assert (status, "--max-lora-rank 32" in message) == (400, True)
    status, message = refused("load", lora_name="none", lora_path=str(tmp_path / "none"))
    assert (status, "no such folder" in message) == (400, True)
    assert refused("unload", lora_name="none") == (404, "the adapter 'none' cannot be found")
    assert names(running) == ["M", "org/M", "one", "two"]


def test_adapters_are_there_again_after_a_crash(
    running: RunningServer, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """All but one whose files are gone, and one that was unloaded."""
    lost = shutil.copytree(folders["three"], tmp_path / "lost")
    assert change(running, "load", lora_name="lost", lora_path=str(lost))[0] == 200
    assert change(running, "load", lora_name="three", lora_path=str(folders["three"]))[0] == 200
    assert change(running, "unload", lora_name="two")[0] == 200
    shutil.rmtree(lost)
    (engine,) = psutil.Process(running.process.pid).children()
    engine.kill()
    running.wait_for(lambda: running.metric("qiao:engine_restarts") == 1)
    running.wait_for(lambda: running.http().get("/health").status_code == 200)
    running.wait_for(lambda: "lost" not in names(running))
    assert names(running) == ["M", "org/M", "one", "three"]
    for name in ("one", "three", "M"):
        assert complete(running, name) == expected["" if name == "M" else name]
    assert change(running, "load", lora_name="two", lora_path=str(folders["two"]))[0] == 200
    assert complete(running, "two") == expected["two"]

"""Several models in one server: aliases, and models that come and go while requests run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from qiao.config import EngineArgs
from qiao.errors import ParameterError
from qiao.lora.request import RUNTIME_VARIABLES, LoRARequest
from qiao.server.access import Access, Tenants
from qiao.server.aliases import Alias
from qiao.server.flags import parse
from qiao.server.fleet import _hand_over
from qiao.server.routes import admin
from starlette.testclient import TestClient

from tests.support.server import RunningServer, chain, started

ADMIN = {"Authorization": "Bearer ADMIN"}
ENDLESS = dict.fromkeys(range(260), 97)


def entry(folder: Path, name: str | list[str], answer: str, **more: Any) -> dict[str, Any]:
    """A model that answers ``x`` with ``answer``, and without end under the salt ``endless``."""
    script = {"table": chain(f"x>{answer}"), "tables": {"endless": ENDLESS}, "pause": 0.002}
    return {"name": name, "model": str(folder), "memory": 0.2, "hf-overrides": script, **more}


@pytest.fixture(scope="module")
def fleet(rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("fleet") / "qiao.yaml"
    content = {
        "max-model-len": 512,
        "admin-key": "ADMIN",
        "models": [entry(rand_folder, ["one", "first"], "eins"), entry(rand_folder, "two", "zwei")],
        "aliases": {"plain": "two", "trial": {"weights": {"one": 3, "two": 1}}},
    }
    file.write_text(yaml.safe_dump(content))
    with started(["--config", str(file)], "tests.support.server") as running:
        yield running


def ask(running: RunningServer, model: str | None, **body: Any) -> dict[str, Any]:
    given = {"prompt": "x", **body} if model is None else {"prompt": "x", "model": model, **body}
    with running.http() as http:
        answer = http.post("/v1/completions", json=given)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_each_name_reaches_its_model(fleet: RunningServer) -> None:
    for name, served, text in (
        ("one", "one", "eins"),
        ("first", "first", "eins"),
        ("two", "two", "zwei"),
        ("plain", "two", "zwei"),
        (None, "one", "eins"),
    ):
        answer = ask(fleet, name)
        assert (answer["model"], answer["choices"][0]["text"]) == (served, text)
    listed = fleet.openai().models.list()
    assert [card.id for card in listed] == ["one", "first", "two", "plain", "trial"]
    assert fleet.openai().models.retrieve("trial").id == "trial"
    unknown = fleet.http().post("/v1/completions", json={"model": "three", "prompt": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert fleet.http().get("/v1/models/three").status_code == 404


def test_an_alias_keeps_users_where_they_are_and_counts_each_arm(fleet: RunningServer) -> None:
    alias = Alias("trial", {"one": 3.0, "two": 1.0})
    expected = {f"u{i}": alias.choose({"user": f"u{i}"}, {"one", "two"}) for i in range(30)}
    assert Counter(expected.values()).keys() == {"one", "two"}
    names = {"alias": "trial", "model_name": "two", "finished_reason": "stop"}
    for _ in range(2):
        assert {user: ask(fleet, "trial", user=user)["model"] for user in expected} == expected
    wanted = sum(arm == "two" for arm in expected.values())
    assert fleet.metric("qiao:alias_requests_total", **names) == 2 * wanted
    assert fleet.metric("qiao:alias_time_to_first_token_seconds_count", alias="trial") == 60
    sessions = [{"X-Session-Id": "s", "Content-Type": "application/json"}] * 8
    body = {"model": "trial", "prompt": "x"}
    arms = {
        fleet.http().post("/v1/completions", json={**body, "user": f"u{i}"}, headers=h).json()["model"]
        for i, h in enumerate(sessions)
    }
    assert len(arms) == 1, "the session counts more than the user"


@pytest.mark.parametrize("kind", ["user", "session", ""])
def test_two_thousand_requests_split_within_two_percent(kind: str) -> None:
    alias = Alias("trial", {"a": 70.0, "b": 20.0, "c": 10.0})
    there = {"a", "b", "c"}
    chosen = [alias.choose({kind: f"id {i}"} if kind else {}, there) for i in range(2000)]
    shares = {name: count / 2000 for name, count in Counter(chosen).items()}
    # Users and sessions are fixed texts. Of 2,000 independent draws the standard deviation would be up to 1.02 %, with
    # one round in seven off by more than 1.5 %; of even ones it is 0.15 %, so that 1.5 % is ten of them away.
    bound = 0.02 if kind else 0.015
    for name, weight in alias.weights.items():
        assert abs(shares[name] - weight / 100.0) < bound


def test_requests_of_nobody_are_spread_evenly_and_in_no_order() -> None:
    """In each block of 64 a model of a quarter has 16, and no two blocks are alike."""
    alias = Alias("trial", {"a": 3.0, "b": 1.0})
    blocks = ["".join(alias.choose({}, {"a", "b"}) or "" for _ in range(64)) for _ in range(20)]
    assert [block.count("b") for block in blocks] == [16] * 20
    assert len(set(blocks)) == 20
    assert {alias.choose({}, {"b"}) for _ in range(64)} == {"b"}


def test_changed_weights_and_missing_models_move_only_who_must() -> None:
    there = {"a", "b", "c"}
    before = Alias("t", {"a": 1.0, "b": 1.0, "c": 1.0})
    after = Alias("t", {"a": 2.0, "b": 1.0, "c": 1.0})
    for i in range(500):
        who = {"user": str(i)}
        old, new, without = before.choose(who, there), after.choose(who, there), before.choose(who, {"a", "b"})
        assert new in (old, "a")
        assert without == old if old != "c" else without in ("a", "b")
    assert before.choose({"user": "1"}, set()) is None
    assert Alias("t", {"a": 1.0, "b": 0.0}).choose({}, {"b"}) is None


def test_swap_under_load_loses_no_request(fleet: RunningServer, rand_folder: Path) -> None:
    """Requests that ran on the old model end there; those that come later are answered by the new one."""
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def load() -> None:
        with fleet.http() as http:
            while not stop.is_set():
                answers.append(http.post("/v1/completions", json={"model": "two", "prompt": "x"}))

    long: list[httpx.Response] = []
    body = {"model": "two", "prompt": "x", "cache_salt": "endless", "max_tokens": 400}
    slow = threading.Thread(target=lambda: long.append(fleet.http().post("/v1/completions", json=body)))
    threads = [threading.Thread(target=load) for _ in range(4)]
    slow.start()
    fleet.wait_for(lambda: fleet.metric("vllm:num_requests_running", model_name="two") > 0)
    for thread in threads:
        thread.start()
    fleet.wait_for(lambda: len(answers) > 20)
    new = entry(rand_folder, "two", "neu")
    swapped = fleet.http(headers=ADMIN).put("/admin/models/two", json=new)
    assert swapped.status_code == 200, swapped.text
    count = len(answers)
    fleet.wait_for(lambda: len(answers) > count + 20)
    stop.set()
    for thread in (*threads, slow):
        thread.join()
    assert {answer.status_code for answer in answers} == {200}
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert set(texts) == {"zwei", "neu"}
    assert set(texts[-10:]) == {"neu"}
    assert long[0].json()["usage"]["completion_tokens"] == 400
    assert [model["state"] for model in swapped.json()["models"]] == ["ready", "ready"]


@pytest.mark.parametrize("root", ["", "/api"])
@pytest.mark.parametrize("keys", [(), ("USER",)])
def test_no_prefix_of_paths_opens_the_administrator_s_routes(root: str, keys: tuple[str, ...]) -> None:
    app = FastAPI(root_path=root)
    app.include_router(admin.router)
    app.add_middleware(Access, tenants=Tenants(keys), refused=lambda call, why: None, admin_key="ADMIN")
    http = TestClient(app, raise_server_exceptions=False)
    for path in ("/admin/models", "/api/admin/models", "/api//admin/models"):
        for key in ("", "USER"):
            assert http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code in (401, 404), path
    for path in {
        "/admin/models",
        f"{root.rstrip('/')}/admin/models",
    }:  # as far as the handler, which has no server here
        assert http.get(path, headers=ADMIN).status_code == 500, path


def test_models_are_loaded_and_unloaded_by_the_administrator_alone(fleet: RunningServer, rand_folder: Path) -> None:
    http = fleet.http(headers=ADMIN)
    for headers in ({}, {"Authorization": "Bearer WRONG"}):
        refused = fleet.http(headers=headers).get("/admin/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    three = entry(rand_folder, "three", "drei")
    assert http.post("/admin/models", json=three).status_code == 201
    assert ask(fleet, "three")["choices"][0]["text"] == "drei"
    assert http.post("/admin/models", json=three).json()["error"]["code"] == "name_taken"
    assert http.put("/admin/aliases/both", json={"weights": {"one": 1, "three": 1}}).status_code == 200
    gone = http.delete("/admin/models/three")
    assert gone.status_code == 200
    assert fleet.http().post("/v1/completions", json={"model": "three", "prompt": "x"}).status_code == 404
    assert ask(fleet, "both", user="whoever")["model"] == "one", "an alias goes on with what is there"
    broken = http.post("/admin/models", json={**three, "hf-overrides": {"fail": "no weights there"}})
    assert broken.status_code == 400 and "no weights there" in broken.json()["error"]["message"]
    assert http.delete("/admin/aliases/both").status_code == 200
    assert http.delete("/admin/models/three").status_code == 404
    wrong = http.post("/admin/models", json={**three, "dtype": "float99"}).json()["error"]
    assert wrong["param"] == "body.dtype"
    code = http.post("/admin/models", json={**three, "trust-remote-code": True}).json()["error"]
    assert code["param"] == "trust-remote-code"
    assert http.put("/admin/aliases/one", json={"weights": {"two": 1}}).status_code == 409


@pytest.fixture(scope="module")
def adapters(rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """Two models with an adapter each, one without, and the folder of the adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
        (folder / name / "answer").write_text(f"adapter {name}")
    models = [
        entry(rand_folder, "one", "eins", **{"enable-lora": True, "lora-modules": [f"a={folder / 'a'}"]}),
        entry(rand_folder, "two", "zwei", **{"enable-lora": True, "lora-modules": [f"b={folder / 'b'}"]}),
        entry(rand_folder, "three", "drei"),
    ]
    content = {"max-model-len": 512, "admin-key": "ADMIN", "models": models, "aliases": {"best": "b"}}
    (folder / "qiao.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME_VARIABLES[0], "1")
        with started(["--config", str(folder / "qiao.yaml")], "tests.support.server") as running:
            yield running, folder


def test_adapters_belong_to_one_of_the_models(adapters: tuple[RunningServer, Path]) -> None:
    running, folder = adapters
    listed = {card.id: card.parent for card in running.openai().models.list().data}
    assert listed == {"one": None, "a": "one", "two": None, "b": "two", "three": None, "best": None}
    wanted = {"one": "eins", "a": "adapter a", "two": "zwei", "b": "adapter b", "three": "drei"}
    assert {name: ask(running, name)["choices"][0]["text"] for name in wanted} == wanted
    through = ask(running, "best")
    assert (through["model"], through["choices"][0]["text"]) == ("b", "adapter b")

    def change(what: str, **body: str) -> tuple[int, str]:
        answer = running.http().post(f"/v1/{what}_lora_adapter", json=body)
        return answer.status_code, answer.text

    new = {"lora_name": "c", "lora_path": str(folder / "c")}
    status, message = change("load", **new)
    assert (status, "one, two" in message) == (400, True), "which model?"
    status, message = change("load", **new, base_model_name="three")
    assert (status, "--enable-lora" in message) == (400, True)
    for name in ("three", "a", "best"):
        assert change("load", **{**new, "lora_name": name}, base_model_name="two")[0] == 400, name
    assert change("load", **new, base_model_name="two")[0] == 200
    assert ask(running, "c")["choices"][0]["text"] == "adapter c"
    assert running.openai().models.retrieve("c").parent == "two"
    with running.http(headers=ADMIN) as http:
        taken = entry(folder, "four", "vier", **{"enable-lora": True, "lora-modules": [f"c={folder / 'c'}"]})
        assert http.post("/admin/models", json=taken).json()["error"]["code"] == "name_taken"
        assert http.put("/admin/aliases/c", json={"weights": {"one": 1}}).status_code == 409
    assert change("unload", lora_name="c")[0] == 200
    assert running.http().post("/v1/completions", json={"model": "c", "prompt": "x"}).status_code == 404
    assert change("unload", lora_name="c")[0] == 404


def test_a_swap_takes_the_adapters_along_that_the_new_model_takes(
    adapters: tuple[RunningServer, Path], rand_folder: Path
) -> None:
    running, folder = adapters
    for name, source in (("fits", "c"), ("lost", "lost"), ("taken", "c")):
        (folder / source).mkdir(exist_ok=True)
        (folder / source / "answer").write_text(f"adapter {source}")
        body = {"lora_name": name, "lora_path": str(folder / source), "base_model_name": "two"}
        assert running.http().post("/v1/load_lora_adapter", json=body).status_code == 200
    (folder / "lost" / "answer").unlink()
    more = {"enable-lora": True, "lora-modules": [f"b={folder / 'a'}", f"taken={folder / 'a'}"]}
    with running.http(headers=ADMIN) as http:
        swapped = http.put("/admin/models/two", json=entry(rand_folder, "two", "neu", **more))
        assert swapped.status_code == 200, swapped.text
        dropped = swapped.json()["dropped_adapters"]
        assert dropped.keys() == {"lost", "taken"}
        assert "no such folder" in dropped["lost"] and "this name" in dropped["taken"]
        wanted = {"two": "neu", "b": "adapter a", "taken": "adapter a", "fits": "adapter c", "a": "adapter a"}
        assert {name: ask(running, name)["choices"][0]["text"] for name in wanted} == wanted
        gone = running.http().post("/v1/completions", json={"model": "lost", "prompt": "x"})
        assert gone.status_code == 404
        assert running.openai().models.retrieve("fits").parent == "two"
        plain = http.put("/admin/models/two", json=entry(rand_folder, "two", "zwei")).json()
    assert plain["dropped_adapters"].keys() == {"fits"}
    assert "--enable-lora" in plain["dropped_adapters"]["fits"]


class Holder:
    """What ``_hand_over`` needs of a model; ``during`` runs while an adapter is loaded."""

    def __init__(self, *added: LoRARequest, during: Callable[[], None] = lambda: None) -> None:
        self.engine_args = EngineArgs(model="M", enable_lora=True)
        self.client, self.during = SimpleNamespace(adapters=self), during
        self.loaded = {one.lora_name: one for one in added}

    @property
    def added(self) -> list[LoRARequest]:
        return list(self.loaded.values())

    @property
    def model_names(self) -> list[str]:
        return list(self.loaded)

    async def load(self, name: str, path: str, base: str | None) -> None:
        await asyncio.sleep(0)
        self.loaded[name] = LoRARequest(name, 1 + len(self.loaded), path, base)
        self.during()

    def unload(self, name: str) -> None:
        del self.loaded[name]


def test_adapters_that_come_go_or_change_during_a_swap() -> None:
    first, other, late = (LoRARequest(name, i, name) for i, name in enumerate(("first", "other", "late"), 1))
    old = Holder(first, other)

    def change() -> None:
        old.loaded.pop("other", None)
        old.loaded |= {"late": late, "first": LoRARequest("first", 9, "elsewhere")}

    new = Holder(during=change)
    assert asyncio.run(_hand_over(old, new)) == {}  # type: ignore[arg-type]
    assert {name: one.lora_path for name, one in new.loaded.items()} == {"first": "elsewhere", "late": "late"}


MODEL = {"name": "a", "model": "M", "memory": 0.4}
LORA = {"enable-lora": True, "lora-modules": ["x=/x"]}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"models": []}, "models"),
        ({"models": [{"model": "M"}]}, "models[0].name"),
        ({"models": [{"name": "a"}]}, "models[0].model"),
        ({"models": [{**MODEL, "memory": 1.5}]}, "models[0].memory"),
        ({"models": [MODEL, {**MODEL, "name": "b", "dtype": "float99"}]}, "models[1].dtype"),
        ({"models": [{**MODEL, "dtpye": "float32"}]}, "models[0].dtpye"),
        ({"models": [{**MODEL, "port": 1}]}, "models[0].port"),
        ({"models": [{**MODEL, "tool-call-parser": "none of them"}]}, "models[0].tool_call_parser"),
        ({"models": [MODEL, MODEL]}, "models[1].name"),
        ({"models": [MODEL, {"name": "b", "model": "M"}]}, "models[1].memory"),
        ({"models": [MODEL, {**MODEL, "name": "b", "memory": 0.7}]}, "models[1].memory"),
        ({"models": [MODEL, {**MODEL, "name": "b", "lora-modules": ["x=/x"]}]}, "models[1].lora_modules"),
        ({"models": [MODEL, {**MODEL, **LORA, "name": "x"}]}, "models[1].lora_modules"),
        ({"models": [{**MODEL, **LORA}, {**MODEL, **LORA, "name": "b"}]}, "models[1].lora-modules"),
        ({"models": [{**MODEL, **LORA}, {**MODEL, "name": "x"}]}, "models[1].name"),
        ({"models": [{**MODEL, **LORA}], "aliases": {"x": "a"}}, "aliases.x"),
        ({"models": [MODEL], "aliases": {"a": "a"}}, "aliases.a"),
        ({"models": [MODEL], "aliases": {"c": "b"}}, "aliases.c"),
        ({"models": [MODEL], "aliases": {"c": {"weights": {"a": -1}}}}, "aliases.c.weights.a"),
        ({"models": [MODEL], "aliases": {"c": {"weights": {"a": "much"}}}}, "aliases.c.weights.a"),
        ({"models": [MODEL], "aliases": {"c": {"weights": {"a": 1}, "sticky": ["moon"]}}}, "aliases.c.sticky"),
        ({"models": [MODEL], "portt": 1}, "--portt"),
    ],
)
def test_errors_of_the_file_name_the_field(content: dict[str, Any], field: str, tmp_path: Path) -> None:
    file = tmp_path / "qiao.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    with pytest.raises(ParameterError) as error:
        parse(["--config", str(file)])
    assert error.value.field == field, error.value


def test_the_file_fills_models_with_flags_for_all_and_their_own(tmp_path: Path) -> None:
    file = tmp_path / "qiao.yaml"
    two = {"name": "b", "model": "N", "device": "cpu", "dtype": "float16", "reasoning-parser": "qwen3"}
    file.write_text(json.dumps({"port": 9, "dtype": "bfloat16", "models": [MODEL, two], "aliases": {"c": "b"}}))
    setup = parse(["--config", str(file), "--max-num-seqs", "7"]).setup
    first, second = setup.models
    assert (first.name, first.engine.model, first.engine.gpu_memory_utilization) == ("a", "M", 0.4)
    assert (first.engine.dtype, second.engine.dtype) == ("bfloat16", "float16")
    assert first.engine.max_num_seqs == second.engine.max_num_seqs == 7
    assert (first.server.reasoning_parser, second.server.reasoning_parser) == (None, "qwen3")
    assert (setup.server.port, first.server.port) == (9, 9)
    assert setup.aliases == (Alias("c", {"b": 1.0}),)


def test_the_page_shows_a_file_that_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/fleet.md").read_text(encoding="utf-8")
    file = tmp_path / "qiao.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    setup = parse(["--config", str(file)]).setup
    assert [model.names for model in setup.models] == [("small",), ("big", "gpt-4o")]
    assert [alias.name for alias in setup.aliases] == ["chat", "trial"]

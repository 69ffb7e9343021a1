"""Vectors, scores and ranks over HTTP and offline, against transformers' hidden states."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from qiao.errors import ModelError, ParameterError
from qiao.llm import LLM
from qiao.loading import Pooling, read_pooling, resolve
from transformers import AutoModelForCausalLM

from tests.support.server import RunningServer

TEXTS = ["The bridge is open.", "a", "桥"]


@pytest.fixture(scope="module")
def hidden(rand_folder: Path) -> Callable[[str], np.ndarray]:
    """Hidden states [T, E] of a text behind the final norm, by transformers (a byte is a token)."""
    model = AutoModelForCausalLM.from_pretrained(rand_folder, dtype=torch.float32)

    def states(text: str) -> np.ndarray:
        ids = torch.tensor([list(text.encode())])
        with torch.no_grad():
            return model.model(ids).last_hidden_state[0].double().numpy()

    return states


def post(server: RunningServer, path: str, body: dict[str, object]) -> httpx.Response:
    return server.http().post(path, json=body)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / math.sqrt((vector * vector).sum())


def test_a_vector_is_the_last_hidden_state(rand: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    answer = rand.openai().embeddings.create(model="M", input=TEXTS, encoding_format="float")
    assert [data.index for data in answer.data] == [0, 1, 2]
    for data, text in zip(answer.data, TEXTS, strict=True):
        np.testing.assert_allclose(data.embedding, unit(hidden(text)[-1]), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(t.encode()) for t in TEXTS)


def test_base64_is_the_client_s_default_and_the_same(rand: RunningServer) -> None:
    plain = rand.openai().embeddings.create(model="M", input="abc", encoding_format="float").data[0].embedding
    assert rand.openai().embeddings.create(model="M", input="abc").data[0].embedding == pytest.approx(plain)
    raw = post(rand, "/v1/embeddings", {"input": "abc", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), np.float32(plain))


def test_token_ids_and_dimensions(rand: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    answer = post(rand, "/v1/embeddings", {"input": [[97, 98], [99]], "dimensions": 5}).json()
    for data, text in zip(answer["data"], ("ab", "c"), strict=True):
        np.testing.assert_allclose(data["embedding"], unit(hidden(text)[-1][:5]), atol=1e-5)
    free = post(rand, "/v1/embeddings", {"input": "ab", "normalize": False}).json()
    np.testing.assert_allclose(free["data"][0]["embedding"], hidden("ab")[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": "a", "dimensions": 4096}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": [400]}, "input"),
        ({}, "input"),
    ],
)
def test_a_wrong_field_is_named(rand: RunningServer, body: dict[str, object], field: str) -> None:
    answer = post(rand, "/v1/embeddings", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_as_many_inputs_as_openai_takes(rand: RunningServer) -> None:
    """2,048, though the queue holds 1,024; no more of them are with the engine than it takes in a step (8), so that
    others need not wait for the rest.
    """
    body: dict[str, object] = {"input": [[i % 200] for i in range(2048)]}
    at_once = []
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, rand, "/v1/embeddings", body)
        while not answer.done():
            at_once.append(rand.metric("vllm:num_requests_running") + rand.metric("vllm:num_requests_waiting"))
    assert max(at_once) <= 8
    data = answer.result().json()["data"]
    assert [entry["index"] for entry in data] == list(range(2048))
    assert data[0]["embedding"] == pytest.approx(data[2000]["embedding"], abs=1e-5)
    assert data[1]["embedding"] != pytest.approx(data[2000]["embedding"], abs=1e-2)
    assert post(rand, "/v1/embeddings", {"input": [[1]] * 2049}).json()["error"]["param"] == "input"


def test_texts_to_score_may_be_long(rand: RunningServer) -> None:
    body = {"text_1": "a bridge " * 300, "text_2": ["a bridge " * 300, "b"], "truncate_prompt_tokens": -1}
    same, other = (entry["score"] for entry in post(rand, "/v1/score", body).json()["data"])
    assert same == pytest.approx(1.0, abs=1e-5) and other < 0.99
    for name, value in (("text_1", []), ("text_2", []), ("text_2", ["a"] * 1025)):
        wrong = post(rand, "/v1/score", {"text_1": "a", "text_2": "b", name: value})
        assert wrong.json()["error"]["param"] == name


def test_scores_are_cosines(rand: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    answer = post(rand, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    expected = [float(unit(hidden(TEXTS[0])[-1]) @ unit(hidden(t)[-1])) for t in TEXTS[1:]]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-5)
    pairs = post(rand, "/score", {"queries": TEXTS[:2], "documents": TEXTS[:2]}).json()
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1.0, 1.0], abs=1e-6)
    wrong = post(rand, "/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")


def test_documents_come_back_by_similarity(rand: RunningServer) -> None:
    documents = ["far", TEXTS[0], {"text": "The bridge is closed."}]
    answer = post(rand, "/v1/rerank", {"query": TEXTS[0], "documents": documents}).json()
    scores = [entry["relevance_score"] for entry in answer["results"]]
    assert answer["results"][0]["index"] == 1
    assert scores == sorted(scores, reverse=True)
    assert {entry["document"]["text"] for entry in answer["results"]} == {"far", TEXTS[0], "The bridge is closed."}
    top = post(rand, "/v2/rerank", {"query": "a", "documents": documents, "top_n": 1, "return_documents": False}).json()
    assert len(top["results"]) == 1
    assert "document" not in top["results"][0]
    wrong = post(rand, "/rerank", {"query": "a", "documents": [{"title": "x"}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "documents")


def test_the_mean_does_not_depend_on_chunks_or_cached_prefixes(
    rand_folder: Path, hidden: Callable[[str], np.ndarray]
) -> None:
    text = "a text that is longer than two blocks of the cache, and than a chunk of the prompt"
    results = []
    for size in (16, 512):
        llm = LLM(
            str(rand_folder),
            dtype="float32",
            num_gpu_blocks_override=32,
            max_num_batched_tokens=size,
            max_num_seqs=4,
            pooler_config={"pooling_type": "MEAN", "normalize": False},
            threads=1,
        )
        twice = [llm.embed(text, use_tqdm=False)[0].outputs.embedding for _ in range(2)]
        assert twice[0] == twice[1]
        results.append(twice[0])
        same = llm.score(text, [text, "b"], use_tqdm=False)
        assert same[0].outputs.score == pytest.approx(1.0)
        assert same[1].outputs.score < 1.0
    np.testing.assert_allclose(results[0], hidden(text).mean(0), atol=1e-4)
    np.testing.assert_allclose(results[0], results[1], atol=1e-6)


def test_pooling_files_are_read(tmp_path: Path, rand_folder: Path) -> None:
    for file in rand_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert read_pooling(resolve(tmp_path), {}) == Pooling("last", True)
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
    assert read_pooling(resolve(tmp_path), {}) == Pooling("mean", False)
    assert read_pooling(resolve(tmp_path), {"normalize": True}) == Pooling("mean", True)
    config.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ModelError, match="pooling_mode_cls_token"):
        read_pooling(resolve(tmp_path), {})
    assert read_pooling(resolve(tmp_path), {"pooling_type": "last"}).kind == "last"
    with pytest.raises(ParameterError, match="pooling_type must be LAST or MEAN"):
        read_pooling(resolve(tmp_path), {"pooling_type": "CLS"})


def test_the_client_s_errors(rand: RunningServer) -> None:
    client: OpenAI = rand.openai()
    with pytest.raises(BadRequestError, match="context"):
        client.embeddings.create(model="M", input="x" * 600)

"""The tokenizer without transformers, against transformers' own on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.loading.text_tokenizer import TextTokenizer, folder_tokenizer
from transformers import AutoTokenizer

from tests.support.tokenizers import byte_tokenizer, spm_tokenizer

TEXT = st.lists(st.sampled_from(["<s>", "</s>", "<unk>", "a", "b", " ", "hello", "é", "你", "\n", "😀"])).map("".join)


def folder_of(path: Path, kind: str = "bytes", model_type: str = "llama", **config: Any) -> Path:
    folder = (byte_tokenizer if kind == "bytes" else spm_tokenizer)(path, **config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def change(folder: Path, **values: Any) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


FRAMES: list[dict[str, Any]] = [
    {},
    {"add_bos_token": False, "add_eos_token": None},
    {"pad_token": "</s>", "unk_token": None},
    {"additional_special_tokens": ["<s>"]},
    {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
]


@pytest.fixture(
    scope="module",
    params=[(k, f) for k in ("bytes", "spm") for f in FRAMES if k == "bytes" or not f.get("chat_template")],
    ids=str,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, Any]:
    kind, config = request.param
    folder = folder_of(tmp_path_factory.mktemp("t"), kind, **config)
    found = folder_tokenizer(folder)
    assert found is not None
    return found, AutoTokenizer.from_pretrained(folder)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(text=TEXT, special=st.booleans())
def test_ids_and_texts_are_transformers_own(pair: tuple[TextTokenizer, Any], text: str, special: bool) -> None:
    mine, theirs = pair
    ids = mine.encode(text, add_special_tokens=special)
    assert ids == theirs.backend_tokenizer.encode(text, add_special_tokens=special).ids
    if text:  # of an empty one transformers makes nothing at all
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
    for skip in (True, False):
        wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert mine.decode(ids, skip_special_tokens=skip) == wanted


def test_facts_are_transformers_own(pair: tuple[TextTokenizer, Any]) -> None:
    mine, theirs = pair
    assert (len(mine), mine.eos_token_id, mine.chat_template) == (
        len(theirs),
        theirs.eos_token_id,
        theirs.chat_template,
    )
    assert mine.get_vocab() == theirs.get_vocab()
    assert mine.special_tokens_map == {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
    specials = [{i for i, token in one.added_tokens_decoder.items() if token.special} for one in pair]
    assert specials[0] == specials[1]
    assert mine.convert_ids_to_tokens([1, 5, 258]) == theirs.convert_ids_to_tokens([1, 5, 258])


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": None},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"model_type": "phi3"},
        {"pad_token": "<no-such-token>"},
        {"added_tokens_decoder": {"256": {"content": "<s>", "special": True, "lstrip": True}}},
        {"auto_map": {"AutoTokenizer": ["code.py", None]}},
        {"extra_special_tokens": {"image_token": "<image>"}},
    ],
)
def test_what_transformers_would_change_is_left_to_it(tmp_path: Path, config: dict[str, Any]) -> None:
    assert folder_tokenizer(folder_of(tmp_path, **config)) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "additional_chat_templates"])
def test_older_places_are_left_to_transformers(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_text("{}")
    assert folder_tokenizer(folder) is None


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    """By ``tokenizer.json`` where the config says nothing; where both speak, transformers decides."""
    frame = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    folder = change(folder_of(tmp_path / "a"), post_processor=frame)
    found = folder_tokenizer(folder)
    assert found is not None
    assert found.encode("ab") == AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == [256, 97, 98]
    assert folder_tokenizer(change(folder_of(tmp_path / "b", add_bos_token=False), post_processor=frame)) is None


@pytest.mark.parametrize("kind", ["TemplateProcessing", "ByteLevel"])
def test_nothing_around_a_text_by_config_and_file(tmp_path: Path, kind: str) -> None:
    """As in SmolLM2's folder: both say the same, so that transformers has nothing to decide."""
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    frames: dict[str, dict[str, Any]] = {
        "TemplateProcessing": {"single": text, "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}]},
        "ByteLevel": {"add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    frame = {"type": kind, "special_tokens": {}} | frames[kind]
    folder = change(folder_of(tmp_path, add_bos_token=False, add_eos_token=False), post_processor=frame)
    found = folder_tokenizer(folder)
    assert found is not None
    for sample in ("ab", " a<s>b ", "é\n"):
        assert found.encode(sample) == AutoTokenizer.from_pretrained(folder)(sample)["input_ids"]


def test_truncation_and_damage_are_left_to_transformers(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert folder_tokenizer(change(folder_of(tmp_path / "cut"), truncation=cut)) is None
    assert folder_tokenizer(change(folder_of(tmp_path / "bad"), model={"type": "no such model"})) is None


def test_a_template_file_wins(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, chat_template="old")
    (folder / "chat_template.jinja").write_text("new")
    found = folder_tokenizer(folder)
    assert found is not None
    assert found.chat_template == AutoTokenizer.from_pretrained(folder).chat_template == "new"


def test_to_transformers_keeps_all(tmp_path: Path) -> None:
    found = folder_tokenizer(folder_of(tmp_path))
    assert found is not None
    again = found.to_transformers()
    assert (again.eos_token, again.chat_template, again.get_vocab()) == ("</s>", found.chat_template, found.get_vocab())

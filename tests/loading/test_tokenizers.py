"""Tokenizers that are rebuilt here, against the libraries that they come from."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.errors import ModelError
from qiao.loading import load_tokenizer
from qiao.loading.vocabularies import SPLITS
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from tests.support.tokenizers import byte_tokenizer

TEXTS = [
    "the cat sat on the mat 1234 5678",
    "你好，世界。今天天气很好",
    "def f(x):\n\treturn x + 1\n\n",
    "naïve café  x   y",
]
TEXT = st.text(st.sampled_from("abcdet hs 0129\n\t,.é你好😀'"), max_size=40)
SPECIAL = ["<|start|>", "<|end|>"]


def write(file: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}.get(type(value), writer.add_array)
        add(f"tokenizer.{key}", value)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A byte-level BPE tokenizer with the published pre-tokenizer of the SmolLM family."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return tokenizer


def bpe_metadata(trained: Tokenizer) -> dict[str, Any]:
    spec = json.loads(trained.to_str())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "ggml.merges": [" ".join(pair) for pair in spec["merges"]],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "chat_template": "{{ messages }}",
    }


@pytest.fixture(scope="module")
def byte_level(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write(tmp_path_factory.mktemp("bpe") / "t.gguf", bpe_metadata(trained)))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(text=TEXT)
def test_byte_level_gguf_cuts_as_the_original(text: str, trained: Tokenizer, byte_level: Any) -> None:
    ids = byte_level(text)["input_ids"]
    assert ids == trained.encode(text).ids
    assert byte_level.decode(ids) == text


def test_specials_and_template_of_a_gguf_file(byte_level: Any) -> None:
    assert (byte_level.bos_token, byte_level.eos_token_id, byte_level.chat_template) == (
        "<|start|>",
        1,
        "{{ messages }}",
    )
    assert byte_level("<|start|>the<|end|>")["input_ids"][0] == 0
    assert byte_level.decode([0, 1], skip_special_tokens=True) == ""


def test_bos_is_added_where_the_file_says_so(trained: Tokenizer, tmp_path: Path) -> None:
    metadata = {**bpe_metadata(trained), "ggml.add_bos_token": True}
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", metadata))
    assert tokenizer("the")["input_ids"][0] == 0
    assert tokenizer("the", add_special_tokens=False)["input_ids"] == trained.encode("the").ids


@pytest.mark.parametrize("change", [{"ggml.pre": "no-such-rule"}, {"ggml.model": "bert"}, {"ggml.merges": ["ab"]}])
def test_what_would_be_cut_wrongly_is_refused(trained: Tokenizer, tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"t\.gguf"):
        load_tokenizer(write(tmp_path / "t.gguf", {**bpe_metadata(trained), **change}))


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("gpt-2", "it's 12345  x", ["it", "'s", " 12345", " ", " x"]),
        ("smollm", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("llama-bpe", "A12345 (x)\n\nb", ["A", "123", "45", " (", "x", ")\n\n", "b"]),
        ("qwen2", "A12 'S", ["A", "1", "2", " '", "S"]),
        ("tekken", "HTTPServer 12", ["HTTPServer", " ", "1", "2"]),
    ],
)
def test_the_cutting_rules(rule: str, text: str, pieces: list[str]) -> None:
    """Worked out by hand from the regular expressions of the model families."""
    from tokenizers import Regex

    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS[rule]])
    assert [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "noprefix"])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece BPE model with byte fallback, as Llama, InternLM2, Baichuan and ChatGLM have."""
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@settings(derandomize=True, max_examples=80, deadline=None)
@given(text=TEXT)
def test_sentencepiece_gguf_cuts_as_sentencepiece(
    text: str, spm: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    file = spm.with_suffix(".gguf")
    if not file.exists():
        pieces = range(model.get_piece_size())
        kinds = [
            2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in pieces
        ]
        metadata = {
            "ggml.model": "llama",
            "ggml.tokens": [model.id_to_piece(i) for i in pieces],
            "ggml.scores": [float(model.get_score(i)) for i in pieces],
            "ggml.token_type": kinds,
            "ggml.add_space_prefix": model.encode("a", out_type=str)[0] != "a",
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2,
            "ggml.unknown_token_id": 0,
        }
        write(file, metadata)
    tokenizer = load_tokenizer(file)
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1
    if text:
        assert ids[1:] == model.encode(text)
    assert tokenizer.decode(ids[1:]) == text


def code_folder(folder: Path, spm: Path, name: str, **config: Any) -> Path:
    """A checkpoint whose tokenizer is Python code; running it would leave a marker."""
    folder.mkdir()
    shutil.copy(spm, folder / "tokenizer.model")
    (folder / "tokenization_x.py").write_text(f"open({str(folder / 'marker')!r}, 'w')\nclass X: pass\n")
    settings_ = {"tokenizer_class": name, "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


def test_internlm2_and_baichuan_load_without_their_code(spm: Path, tmp_path: Path) -> None:
    extra = {"360": {"content": "<|im_start|>", "special": True}, "362": {"content": "<|im_end|>", "special": True}}
    folder = code_folder(
        tmp_path / "m",
        spm,
        "InternLM2Tokenizer",
        added_tokens_decoder=extra,
        bos_token="<s>",
        eos_token={"content": "</s>"},
        add_bos_token=True,
        chat_template="{{ messages }}",
    )
    tokenizer = load_tokenizer(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    ids = tokenizer("the cat")["input_ids"]
    assert ids == [1, *model.encode("the cat")]
    assert tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [362]
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (2, "{{ messages }}")
    assert not (folder / "marker").exists()


def test_chatglm3_loads_without_its_code(spm: Path, tmp_path: Path) -> None:
    folder = code_folder(tmp_path / "m", spm, "ChatGLMTokenizer")
    tokenizer = load_tokenizer(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    assert tokenizer("the cat")["input_ids"] == [361, 363, *model.encode("the cat")]  # [gMASK] sop
    assert tokenizer("<|user|>", add_special_tokens=False)["input_ids"] == [366]
    assert tokenizer.eos_token_id == 2
    assert not (folder / "marker").exists()


def test_glm4_ranks_load_without_its_code(spm: Path, tmp_path: Path) -> None:
    """Against tiktoken itself."""
    import tiktoken

    ranks = {bytes([b]): b for b in range(256)}
    for word in (b"th", b"the", b" c", b" ca", b" cat", "你".encode(), "你".encode()[:2], b"12", b"123"):
        ranks[word] = len(ranks)
    folder = code_folder(
        tmp_path / "m",
        spm,
        "ChatGLM4Tokenizer",
        added_tokens_decoder={
            str(len(ranks)): {"content": "<|endoftext|>", "special": True},
            str(len(ranks) + 1): {"content": "[gMASK]", "special": True},
            str(len(ranks) + 2): {"content": "<sop>", "special": True},
        },
        eos_token="<|endoftext|>",
    )
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(folder)
    reference = tiktoken.Encoding("glm4", pat_str=SPLITS["glm4"][0], mergeable_ranks=ranks, special_tokens={})
    for text in ("the cat 12345", "你好 the", "  x\n\n1"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == reference.encode(text)
    assert tokenizer("")["input_ids"] == [len(ranks) + 1, len(ranks) + 2]
    assert tokenizer.eos_token_id == len(ranks)


def test_code_alone_is_not_run_and_the_remedy_is_named(spm: Path, tmp_path: Path) -> None:
    folder = code_folder(tmp_path / "m", spm, "QWenTokenizer")
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes(b"garbage")
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        load_tokenizer(folder)
    assert not (folder / "marker").exists()


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="--tokenizer"):
        load_tokenizer(tmp_path)


def test_byte_tokenizer_is_what_the_cases_say(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_with_config(byte_tokenizer(tmp_path, extra_tokens={300: "hello"})))
    assert tokenizer("é<|im_end|>hello")["input_ids"] == [0xC3, 0xA9, 259, 300]
    assert tokenizer.decode([300, 33]) == "hello!"


def _with_config(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder

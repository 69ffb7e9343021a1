from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.errors import ModelError
from qiao.loading import ModelFiles, iter_weights, load_config, load_generation_config, resolve
from qiao.loading.ggml_types import TYPES
from qiao.loading.gguf import count_gguf, read_tensor
from qiao.loading.gguf_file import GGUFTensor, open_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.checkpoints import rand_checkpoint, rand_config
from tests.support.gguf import write_gguf

IDS = torch.arange(40)[None] * 7 % 320
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama_bias": {"attention_bias": True},
    "llama_linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama_yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "qwen3_moe": {**MOE, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 16},
}


def load(file: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_weights(resolve(file), progress=False, dequantize=True)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_config_give_the_original_model(family: str, tmp_path: Path) -> None:
    """Written by the converter's rules and read back, the model computes what the original does."""
    model_type = {"llama_bias": "llama", "llama_linear": "llama", "llama_yarn": "llama"}.get(family, family)
    folder = rand_checkpoint(tmp_path / "hf", model_type=model_type, **FAMILIES[family])
    file = write_gguf(folder, tmp_path / "m.gguf")
    original = load_file(folder / "model.safetensors")
    weights = load(file)
    assert weights.keys() == original.keys()
    assert count_gguf(resolve(file).header) == len(original)
    for name, values in original.items():
        torch.testing.assert_close(weights[name], values, rtol=0, atol=2e-7)
    config = load_config(resolve(file))
    again = tmp_path / "again"
    again.mkdir()
    config.save_pretrained(again)
    save_file(weights, again / "model.safetensors", metadata={"format": "pt"})
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"))
    actual = logits(AutoModelForCausalLM.from_pretrained(again, attn_implementation="eager"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_llama_agrees_with_transformers_own_reader(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "hf")
    file = write_gguf(folder, tmp_path / "m.gguf", "Q8_0", metadata={"llama.vocab_size": 320})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    mine = load(file)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_llama3_rope_is_read_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = rand_config(rope_scaling=scaling, rope_theta=500000.0, head_dim=64, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2) / 64))
    folder = rand_checkpoint(tmp_path / "hf", rope_theta=500000.0, head_dim=64, max_position_embeddings=131072)
    factors = (plain / scaled).float().numpy()
    file = write_gguf(folder, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    found = load_config(resolve(file)).rope_parameters
    assert {key: found[key] for key in scaling} == scaling
    odd = write_gguf(folder, tmp_path / "odd.gguf", extra={"rope_freqs.weight": factors**2})
    with pytest.raises(ModelError, match="rope factors"):
        load_config(resolve(odd))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_are_near_the_original(kind: str, tmp_path: Path, rand: Path) -> None:
    file = write_gguf(rand, tmp_path / "m.gguf", kind)
    original = load_file(rand / "model.safetensors")
    bits = {"F16": 11, "BF16": 8, "Q8_0": 7, "Q5_0": 4, "Q5_1": 4}.get(kind, 3)
    for name, values in load(file).items():
        error = (values.float() - original[name]).abs().max() / original[name].abs().max()
        assert error <= 1.1 * 2.0**-bits, name
    expected = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert load(file)["lm_head.weight"].dtype == expected


def test_types_are_those_of_the_gguf_package() -> None:
    assert {(kind.number, kind.name): (kind.block, kind.block_bytes) for kind in TYPES.values()} == {
        (kind.value, kind.name): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }


DECODED = sorted(kind.name for kind in quants._type_traits)


@pytest.mark.parametrize("kind", DECODED)
def test_every_type_that_the_gguf_package_decodes(kind: str, tmp_path: Path) -> None:
    """Random blocks, decoded as one matrix and by the package block by block."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rows, columns = 3, 2 * block
    raw = np.random.default_rng(0).integers(0, 60, (rows, 2 * size), dtype=np.uint8)
    file = tmp_path / "t"
    file.write_bytes(b"pad" + raw.tobytes())
    tensor = read_tensor(GGUFTensor("t", (rows, columns), TYPES[number], file, 3, raw.size))
    if kind == "BF16":
        assert tensor.dtype == torch.bfloat16
    blocks = [quants.dequantize(row[i * size : (i + 1) * size], number) for row in raw for i in range(2)]
    expected = np.concatenate(blocks).reshape(rows, columns)
    np.testing.assert_array_equal(tensor.float().numpy(), expected)


def test_split_files(tmp_path: Path, rand: Path) -> None:
    whole = load(write_gguf(rand, tmp_path / "w.gguf"))
    writer_file = tmp_path / "s-00001-of-00002.gguf"
    _write_split(rand, tmp_path)
    parts = load(writer_file)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert resolve(_only(tmp_path, "s-")).gguf is not None
    (tmp_path / "s-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"s-00002-of-00002\.gguf is missing"):
        load(writer_file)


def _only(folder: Path, prefix: str) -> Path:
    target = folder / "only"
    target.mkdir()
    for file in folder.glob(prefix + "*"):
        (target / file.name).hardlink_to(file)
    return target


def _write_split(rand: Path, target: Path) -> None:
    full = open_gguf(write_gguf(rand, target / "full.gguf"))
    names = list(full.tensors)
    for part, held in enumerate((names[:5], names[5:]), start=1):
        writer = gguf.GGUFWriter(target / f"s-{part:05d}-of-00002.gguf", "llama")
        if part == 1:
            for key, value in full.metadata.items():
                if key.startswith("llama."):
                    writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
        for name in held:
            writer.add_tensor(name, read_tensor(full.tensors[name]).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_generation_config_knows_every_end_token(tmp_path: Path, rand: Path) -> None:
    tokens = ["a", "<|im_end|>", "</s>", "<|eot_id|>", "x"]
    file = write_gguf(
        rand,
        tmp_path / "m.gguf",
        metadata={
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 3, 3, 1, 1],
            "tokenizer.ggml.eot_token_id": 4,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 7,
        },
    )
    found = load_generation_config(resolve(file))
    assert found["eos_token_id"] == [257, 4, 1, 2]
    assert (found["temperature"], found["top_k"]) == (0.5, 7)


def test_unknown_families_and_tensors_are_named(tmp_path: Path, rand: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"family 'mamba'.*llama"):
        load_config(resolve(tmp_path / "x.gguf"))
    file = write_gguf(rand, tmp_path / "m.gguf", extra={"blk.0.strange.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.strange\.weight"):
        load(file)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    hf = rand_checkpoint(folder / "hf", num_hidden_layers=1)
    return write_gguf(hf, folder / "m.gguf").read_bytes()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + b"\0" * 40, b"version https://git-lfs" + b"\0" * 40])
def test_what_is_no_gguf_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load(file)


def test_other_versions_are_refused(tmp_path: Path, small: bytes) -> None:
    file = tmp_path / "m.gguf"
    for version in (b"\x01\0\0\0", b"\0\0\0\x03"):
        file.write_bytes(small[:4] + version + small[8:])
        with pytest.raises(ModelError, match="version"):
            load(file)


def test_truncated_data_is_named(tmp_path: Path, small: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(small[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        load(file)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(cut=st.floats(0, 1), flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4))
def test_damage_is_always_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, cut: float, flips: list[tuple[int, int]]
) -> None:
    """Cut anywhere and with any bytes of the header changed: it loads, or says what is wrong; nothing else escapes."""
    raw = bytearray(small[: int(len(small) * cut)] if cut < 0.9 else small)
    for place, value in flips:
        if place < len(raw):
            raw[place] = value
    file = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    file.write_bytes(raw)
    files = ModelFiles("m", file.parent, file)
    try:
        load_config(files)
        list(iter_weights(files, progress=False))
    except ModelError as error:
        assert "m.gguf" in str(error)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(alignment: int, tmp_path: Path) -> None:
    """Data starts, and each tensor lies, at multiples of what the file says."""
    values = {"token_embd.weight": np.arange(15, dtype=np.float32).reshape(5, 3), "output.weight": np.ones((5, 3))}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for name, array in values.items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "m.gguf").tensors
    for name, array in values.items():
        assert found[name].offset % alignment == 0
        np.testing.assert_array_equal(read_tensor(found[name]).numpy(), array)


@pytest.mark.parametrize("alignment", [0, 24])
def test_an_alignment_that_is_none(alignment: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"m\.gguf.*alignment is {alignment}"):
        open_gguf(tmp_path / "m.gguf")

"""The composition root: what is refused before weights are read, and what the engine is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.build import build_engine
from qiao.config import EngineArgs
from qiao.contract import Capabilities
from qiao.engine.request import EngineRequest
from qiao.errors import ParameterError, PluginError, UsageError
from qiao.models.placing import shape_for
from qiao.quantization import QuantizedWeight, WeightForm
from qiao.sampling_params import SamplingParams

from tests.support.checkpoints import edit_config, rand_checkpoint, rand_config


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("rand"))


def _args(model: Path, **changes: object) -> EngineArgs:
    return replace(EngineArgs(model=str(model), device="cpu", num_gpu_blocks_override=8), **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"load_format": "pt"}, "load_format"),
        ({"quantization": "gptq"}, "quantization"),
        ({"dtype": "float16", "device": "cpu", "max_model_len": 100_000}, "max_model_len"),
        ({"fallback": "sometimes"}, "fallback"),
        ({"drop": ("atention",)}, "drop"),
        ({"num_gpu_blocks_override": 1 << 40}, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(rand: Path, changes: dict[str, object], field: str) -> None:
    with pytest.raises(ParameterError) as raised:
        build_engine(_args(rand, **changes))
    assert raised.value.field == field


def test_refusals_come_before_weights(rand: Path, tmp_path: Path) -> None:
    """A folder whose weights are gone still tells what is wrong with the arguments."""
    for file in rand.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ParameterError, match="fallback"):
        build_engine(_args(tmp_path, fallback="never"))
    with pytest.raises(ParameterError, match="max_model_len"):
        build_engine(_args(tmp_path, max_model_len=100_000))
    with pytest.raises(PluginError, match="quux"):
        build_engine(_args(tmp_path, device="quux"))
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        build_engine(_args(tmp_path))


def test_the_context_follows_a_small_cache(rand: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Public case B033: what the cache cannot hold is not promised."""
    info = build_engine(_args(rand)).info
    assert (info.max_model_len, info.kv_tokens) == (128, 128)
    assert "holds 128 tokens" in caplog.text


def test_the_block_size_comes_from_the_device_unless_set(rand: Path) -> None:
    assert build_engine(_args(rand)).info.block_size == 16
    assert build_engine(_args(rand, block_size=4)).info.block_size == 4


@pytest.mark.parametrize("size", [1, 2, 3, 512])
def test_blocks_of_any_size_give_the_same_tokens(rand: Path, size: int) -> None:
    """The probe's own sequence must fit its cache: it was written beyond the end of two small blocks."""

    def tokens(block_size: int) -> list[int]:
        engine = build_engine(_args(rand, block_size=block_size, num_gpu_blocks_override=512 // block_size)).engine
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.add_request(EngineRequest(request_id="r", prompt_token_ids=list(range(37)), params=params, arrival=0.0))
        found: list[int] = []
        while engine.has_work():
            found += [token for output in engine.step() for token in output.token_ids]
        return found

    assert tokens(size) == tokens(16)
    assert len(tokens(size)) == 20


def test_kept_blocks_are_found_only_by_what_would_make_the_same(rand: Path) -> None:
    def identity(**changes: Any) -> str:
        sizes = build_engine(_args(rand, kv_offloading_size=0.01, **changes)).engine.config.kv_offloading
        assert sizes is not None
        return sizes.identity

    names = [identity(), identity(max_model_len=64), identity(dtype="bfloat16"), identity(block_size=4)]
    assert len(set(names)) == 4 and identity() == names[0]


def test_info_says_what_was_built(rand: Path) -> None:
    built = build_engine(_args(rand, max_num_seqs=7))
    info = built.info
    assert (info.vocab_size, info.max_num_seqs, info.dtype, info.num_blocks) == (320, 7, "float32", 8)
    assert info.plan == built.plan.as_dict()
    assert "num-gpu-blocks-override" in info.kv_explanation


@pytest.mark.parametrize(
    ("checkpoint", "asked", "chip", "runs"),
    [
        ("bfloat16", "auto", ("float32", "bfloat16"), "bfloat16"),
        ("bfloat16", "auto", ("float16", "float32"), "float16"),
        ("bfloat16", "half", ("float16", "float32"), "float16"),
        ("float32", "torch.bfloat16", ("bfloat16",), "bfloat16"),
    ],
)
def test_dtype(checkpoint: str, asked: str, chip: tuple[str, ...], runs: str) -> None:
    config = rand_config(dtype=checkpoint)
    assert shape_for(config, asked, Capabilities(dtypes=chip)).dtype == runs


def test_a_dtype_that_the_chip_lacks_is_refused() -> None:
    with pytest.raises(ParameterError, match="bfloat16 is not supported by this device; it has float16") as raised:
        shape_for(rand_config(), "bfloat16", Capabilities(dtypes=("float16",)))
    assert raised.value.field == "dtype"


@pytest.mark.parametrize(
    ("quantized", "dtype", "kv_dtypes", "kept"),
    [
        (True, "float32", ("float32", "float16"), "float16"),
        (True, "float32", ("float32",), "float32"),
        (True, "bfloat16", ("float32", "float16", "bfloat16"), "bfloat16"),
        (False, "float32", ("float32", "float16"), "float32"),
    ],
)
def test_a_quantized_models_cache_in_float32_takes_half(
    quantized: bool, dtype: str, kv_dtypes: tuple[str, ...], kept: str
) -> None:
    capabilities = Capabilities(dtypes=("float32", "bfloat16"), kv_dtypes=kv_dtypes)
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    weight = QuantizedWeight(WeightForm("w4a16", 32), {"weight": codes, "scale": torch.ones(64, 2)})
    weights = {"model.layers.0.self_attn.o_proj.weight": weight} if quantized else {}
    assert shape_for(rand_config(), dtype, capabilities, weights).cache_dtype == kept


def test_the_cache_has_the_dtype_of_the_model(rand: Path) -> None:
    full, half = (build_engine(_args(rand, dtype=d)).engine.config for d in ("float32", "bfloat16"))
    assert (full.dtype, half.dtype) == (torch.float32, torch.bfloat16)


def test_the_cache_has_the_dtype_that_the_user_chose(rand: Path) -> None:
    auto, codes, half = (
        build_engine(
            _args(rand, dtype="float32", kv_cache_dtype=d, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20)
        )
        for d in ("auto", "int8", "bfloat16")
    )
    assert [x.info.kv_cache_dtype for x in (auto, codes, half)] == ["float32", "int8", "bfloat16"]
    assert [x.info.dtype for x in (auto, codes, half)] == ["float32"] * 3
    shape = auto.plan.shape
    size = shape.attention[0].head_dim
    assert codes.info.num_blocks == pytest.approx(auto.info.num_blocks * 4 * size / (size + 4), rel=0.02)
    assert half.info.num_blocks == pytest.approx(auto.info.num_blocks * 2, rel=0.02)
    assert codes.engine.config.dtype == torch.int8


@pytest.mark.parametrize(("name", "said"), [("fp8", "int8"), ("fp8_e4m3", "int8"), ("int4", "must be one of auto,")])
def test_a_dtype_that_no_cache_has_is_refused(rand: Path, name: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as raised:
        _args(rand, kv_cache_dtype=name)
    assert raised.value.field == "kv_cache_dtype"


def test_hf_overrides_reach_the_model(rand: Path) -> None:
    built = build_engine(_args(rand, hf_overrides={"max_position_embeddings": 64}))
    assert built.info.max_model_len == 64


@pytest.mark.parametrize("method", ["gptq", "hqq"])
def test_a_checkpoint_that_is_not_quantized_as_it_says_is_refused(method: str, tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path)
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UsageError, match=method):
        build_engine(_args(folder))

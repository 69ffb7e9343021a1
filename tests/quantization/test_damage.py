"""Any part of any quantized format, damaged in any way: refused by name, or it did not matter. Never other values."""

from __future__ import annotations

import shutil

import pytest
import torch
from qiao.errors import ModelError
from qiao.loading import iter_weights, resolve
from safetensors.torch import load_file, save_file

from tests.quantization.test_checkpoints import (
    FOUR_BIT,
    STATIC_INPUTS,
    awq_settings,
    compressed_settings,
    gptq_settings,
)
from tests.support.fallback import host_backend
from tests.support.quantized import load, place
from tests.support.quantizers import awq, bitsandbytes, bitsandbytes_int8, compressed, fp8, gptq, quantized_checkpoint

BY_GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
FORMATS = {
    "gptq": (gptq(), gptq_settings()),
    "gptq-act-order": (gptq(act_order=True), gptq_settings(desc_act=True)),
    "gptq-sym": (gptq(symmetric=True), gptq_settings(sym=True)),
    "gptq-3": (gptq(3), gptq_settings(3)),
    "awq": (awq(), awq_settings()),
    "awq-gemv": (awq(gemv=True), awq_settings(version="gemv")),
    "packed": (
        compressed(4, 32, packed=True, symmetric=False, act_order=True),
        compressed_settings({**BY_GROUP, "symmetric": False, "actorder": "group"}, format="pack-quantized"),
    ),
    "int8": (
        compressed(8),
        compressed_settings({"num_bits": 8, "strategy": "channel"}, format="int-quantized"),
    ),
    "int8-static": (
        compressed(8, one_scale=True, static=True),
        compressed_settings(
            {"num_bits": 8, "strategy": "tensor"}, format="int-quantized", group={"input_activations": STATIC_INPUTS}
        ),
    ),
    "fp8": (fp8(True), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-blocks": (fp8(block=(48, 32)), {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "nf4": (bitsandbytes(), FOUR_BIT),
    "nf4-nested": (bitsandbytes(nested=True), FOUR_BIT),
    "llm-int8": (bitsandbytes_int8(), {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
MODULE = "model.layers.0.mlp.down_proj"

DAMAGE = {
    "missing": lambda t: None,
    "one row short": lambda t: t[:-1] if t.dim() else None,
    "one column short": lambda t: t[..., :-1] if t.dim() else None,
    "transposed": lambda t: t.T if t.dim() == 2 and t.shape[0] != t.shape[1] else None,
    "flat": lambda t: t.flatten() if t.dim() == 2 and min(t.shape) > 1 else t[None],
    "empty": lambda t: t[:0] if t.dim() else None,
    "one more dimension": lambda t: t[None],
    "other type": lambda t: t.to(torch.int64 if not t.is_floating_point() else torch.int32),
    "NaN": lambda t: poked(t, float("nan")),
    "infinity": lambda t: poked(t, float("inf")),
    "negative": lambda t: t - 2 * t.abs() - 1 if not t.is_floating_point() else None,
}


def poked(tensor, value):
    if not tensor.is_floating_point() or (tensor.element_size() == 1 and value == float("inf")):
        return None
    tensor = tensor.float() if tensor.element_size() > 1 else tensor
    changed = tensor.clone()
    if changed.element_size() == 1:
        changed.view(torch.uint8).view(-1)[0] = 127
    else:
        changed.view(-1)[0] = value
    return changed


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each format once."""
    base = tmp_path_factory.mktemp("damage")
    return {n: quantized_checkpoint(base / n, *made, num_hidden_layers=1)[0] for n, made in FORMATS.items()}


def values_of(folder):
    """The module's values, read as the engine reads them: headers and plan first, then the tensors into the layers."""
    _, ops = place(folder, host_backend())
    load(folder, ops)
    return dict(iter_weights(resolve(folder), progress=False, dequantize=True))[f"{MODULE}.weight"]


def parts_of(folder):
    held = load_file(folder / "model.safetensors")
    return [name.removeprefix(f"{MODULE}.") for name in held if name.startswith(f"{MODULE}.")]


@pytest.mark.parametrize("name", FORMATS)
def test_every_part_of_a_format(name, folders, tmp_path):
    """Each part with each damage."""
    whole = values_of(folders[name])
    folder = shutil.copytree(folders[name], tmp_path / "m")
    held = load_file(folders[name] / "model.safetensors")
    told, tried = {}, 0
    for part in parts_of(folder):
        full = f"{MODULE}.{part}"
        for damage, change in DAMAGE.items():
            changed = change(held[full])
            if changed is None and damage != "missing":
                continue
            if damage == "negative" and not part.endswith(("g_idx", "shape")):
                continue  # other codes, which no file can tell from its own
            tensors = {n: t for n, t in held.items() if n != full}
            tensors |= {} if changed is None else {full: changed.contiguous().clone()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            tried += 1
            told[part, damage] = outcome(folder, whole)
    assert tried >= 8
    wrong = {key: text for key, text in told.items() if text not in ("refused", "same")}
    assert not wrong
    assert sum(text == "refused" for text in told.values()) > 0.6 * tried


def outcome(folder, whole):
    """``refused`` by an error that names the module, ``same`` values, or what else happened."""
    try:
        found = values_of(folder)
    except ModelError as error:
        return "refused" if MODULE in str(error) else f"not named: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "same" if torch.equal(found, whole) else "other values"


def test_float8_without_a_scale_and_without_a_config(tmp_path):
    """Codes alone would be taken for values."""
    folder, _ = quantized_checkpoint(tmp_path, fp8(), None)
    held = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.endswith("weight_scale")}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    _, ops = place(folder, host_backend())
    with pytest.raises(ModelError, match=r"proj\.weight is float8_e4m3fn and has no scale"):
        load(folder, ops)

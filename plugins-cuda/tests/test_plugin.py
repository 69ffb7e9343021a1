"""What the plugin says without a GPU: profiles, troubles with remedies, calls of NVML and FlashInfer as documented."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from qiao.contract import AttentionMetadata, KVCache
from qiao_cuda import _nvml, _sdk, device
from qiao_cuda.chips import CAPTURE_SIZES, capabilities_of

from tests.support.gpus import card, runtime

attention = import_module("qiao_cuda.attention")
"""The module; the package's own name is the hook."""


@pytest.mark.parametrize(
    ("chip", "dtypes"),
    [
        ("sm_75", ("float16", "float32")),
        ("sm_80", ("bfloat16", "float16", "float32")),
        ("sm_90a", ("bfloat16", "float16", "float32")),
        ("sm_103", ("bfloat16", "float16", "float32")),
        ("", ("bfloat16", "float16", "float32")),
    ],
)
def test_profiles(chip, dtypes) -> None:
    found = capabilities_of(chip)
    assert found.dtypes == dtypes and found.kv_dtypes == (*dtypes, "int8")
    assert found.capture_sizes == CAPTURE_SIZES and list(CAPTURE_SIZES) == sorted(set(CAPTURE_SIZES))


def test_a_chip_that_is_too_old() -> None:
    with pytest.raises(LookupError, match="no kernels for sm_70; there are some for sm_75"):
        capabilities_of("sm_70")


def test_no_card_is_no_trouble(tmp_path) -> None:
    assert _sdk.trouble(tmp_path, tmp_path / "version") == ""
    card(tmp_path, "0x1002", "0x030000")
    card(tmp_path, "0x10de", "0x040300", "0000:3b:00.1")  # the sound of a card, or a bridge
    assert _sdk.trouble(tmp_path, tmp_path / "version") == ""


def test_a_missing_driver_names_the_package(tmp_path) -> None:
    card(tmp_path, "0x10de", "0x030200", driver="nouveau")
    said = _sdk.trouble(tmp_path, tmp_path / "version")
    assert "1 NVIDIA device on the PCI bus (0000:33:00.0), held by the kernel driver nouveau" in said
    assert "install the package nvidia-driver (Debian)" in said


def test_a_torch_without_cuda(tmp_path, monkeypatch) -> None:
    card(tmp_path, "0x10de", "0x030200", driver="nvidia")
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA: pip install torch --index-url" in _sdk.trouble(tmp_path, driver)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    said = _sdk.trouble(tmp_path, driver)
    assert "CUDA_VISIBLE_DEVICES hides them" in said and "580.95.05" in said and "CUDA 12.8" in said


def fake_cuda(*capabilities: tuple[int, int]) -> SimpleNamespace:
    facts = {"uuid": "0-1", "total_memory": 80 << 30}
    named = enumerate(capabilities)
    return runtime([{**facts, "name": f"GPU {i}", "major": major, "minor": minor} for i, (major, minor) in named])


def test_probe(monkeypatch) -> None:
    monkeypatch.setattr(_sdk, "runtime", lambda: fake_cuda((9, 0), (6, 1)))
    monkeypatch.setattr(_sdk, "has_triton", lambda: True)
    monkeypatch.setattr(_nvml, "health", lambda uuid: "3 uncorrected memory errors")
    (found,) = device.probe_devices()
    assert (found.name, found.torch_device, found.chip, found.memory_bytes) == ("cuda:0", "cuda:0", "sm_90", 80 << 30)
    assert found.evidence.startswith("GPU 0") and found.evidence.endswith("3 uncorrected memory errors")
    monkeypatch.setattr(_sdk, "runtime", lambda: fake_cuda((6, 1)))
    with pytest.raises(RuntimeError, match=r"older than compute capability 7\.5"):
        device.probe_devices()
    monkeypatch.setattr(_sdk, "has_triton", lambda: False)
    with pytest.raises(RuntimeError, match="pip install triton"):
        device.probe_devices()


def test_probe_without_a_gpu_says_what_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(_sdk, "runtime", lambda: fake_cuda())
    monkeypatch.setattr(_sdk, "trouble", lambda: "")
    assert device.probe_devices() == []
    monkeypatch.setattr(_sdk, "trouble", lambda: "the driver is missing")
    with pytest.raises(RuntimeError, match="the driver is missing"):
        device.probe_devices()


class NvmlError(Exception):
    pass


def fake_nvml(**answers) -> ModuleType:
    module = ModuleType("pynvml")
    module.NVMLError = NvmlError
    module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, module.NVML_VOLATILE_ECC, module.NVML_TEMPERATURE_GPU = 1, 0, 0
    module.nvmlClocksThrottleReasonHwThermalSlowdown, module.nvmlClocksThrottleReasonSwThermalSlowdown = 0x40, 0x20
    module.nvmlInit = lambda: None

    def by_uuid(uuid):
        if uuid != "GPU-0-1":
            raise NvmlError(f"no {uuid}")
        return "handle"

    module.nvmlDeviceGetHandleByUUID = by_uuid
    usual = {
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=73),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (0, 0, False, False),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetTemperature": 91,
    }
    for name, value in {**usual, **answers}.items():
        setattr(module, name, lambda handle, *rest, value=value: answer(handle, value))
    return module


def answer(handle, value):
    assert handle == "handle"
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, ""),
        ({"nvmlDeviceGetTotalEccErrors": 3}, "3 uncorrected memory errors"),
        ({"nvmlDeviceGetTotalEccErrors": NvmlError("not supported")}, ""),
        ({"nvmlDeviceGetRemappedRows": (1, 0, True, False)}, "reset the GPU"),
        ({"nvmlDeviceGetRemappedRows": (1, 1, True, True)}, "should be replaced"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x20}, "slowed down by heat, 91 degrees"),
    ],
)
def test_health(monkeypatch, answers, said) -> None:
    monkeypatch.setattr(_nvml, "library", lambda: fake_nvml(**answers))
    found = _nvml.health("0-1")
    assert said in found and bool(found) == bool(said)


def test_busy(monkeypatch) -> None:
    monkeypatch.setattr(_nvml, "library", lambda: fake_nvml())
    assert _nvml.busy("0-1") == 0.73
    with pytest.raises(RuntimeError, match="NVML cannot tell: no GPU-7"):
        _nvml.busy("7")
    monkeypatch.setattr(_nvml, "library", lambda: None)
    assert _nvml.health("0-1") == ""
    with pytest.raises(RuntimeError, match="pip install nvidia-ml-py"):
        _nvml.busy("0-1")


class Wrapper:
    """FlashInfer's documented calls, noted."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace, layout) -> None:
        assert workspace.dtype == torch.uint8 and not workspace.any() and layout == "NHD"
        Wrapper.made.append(self)

    def plan(self, qo_indptr, kv_indptr, indices, last_page_len, heads, kv_heads, dim, page, **options) -> None:
        for index in (qo_indptr, kv_indptr, indices, last_page_len):
            assert index.dtype == torch.int32
        assert int(last_page_len.min()) >= 1 and int(last_page_len.max()) <= page
        self.planned = (kv_indptr.tolist(), indices.tolist(), last_page_len.tolist(), heads, kv_heads, dim, page)
        self.options = options

    def run(self, query, cache):
        assert query.is_contiguous() and len(cache) == 2
        return query + 1


def test_flashinfer_gets_its_page_table(monkeypatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    monkeypatch.setattr(attention, "_WORKSPACE", 16)
    attention._workspace.cache_clear()
    Wrapper.made.clear()
    tables = torch.tensor([[4, 7, 0], [2, 0, 0]], dtype=torch.int32)
    metadata = AttentionMetadata(
        torch.tensor([0, 3, 4], dtype=torch.int32),
        torch.tensor([32, 5], dtype=torch.int32),
        tables,
        torch.arange(4),
        (3, 1),
        (32, 5),
    )
    assert attention.prepare_attention(metadata, 8, 2, 64, 16) is None, "not asked for"
    monkeypatch.setenv("QIAO_CUDA_ATTENTION", "flashinfer")
    assert attention.prepare_attention(metadata, 8, 2, 80, 16) is None, "heads that it does not take"
    plan = attention.prepare_attention(metadata, 8, 2, 64, 16)
    query = torch.zeros(4, 8, 64, dtype=torch.float16)
    cache = KVCache(*(torch.zeros(9, 16, 2, 64, dtype=torch.float16) for _ in range(2)), 16, "NHD")
    metadata = AttentionMetadata(*(getattr(metadata, f) for f in metadata.__dataclass_fields__ if f != "plan"), plan)
    for _ in range(2):  # two layers of one kind share a plan
        assert attention.attention(query, cache, metadata, 0.125, 6, 0.0).eq(1).all()
    attention.attention(query, cache, metadata, 0.125, 0, 30.0)
    assert [w.planned for w in Wrapper.made] == [([0, 2, 3], [4, 7, 2], [16, 5], 8, 2, 64, 16)] * 2
    assert [w.options["window_left"] for w in Wrapper.made] == [5, -1]
    assert [w.options["logits_soft_cap"] for w in Wrapper.made] == [0.0, 30.0]


def test_flashinfer_asked_for_and_missing(monkeypatch) -> None:
    monkeypatch.setenv("QIAO_CUDA_ATTENTION", "flashinfer")
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install qiao-cuda\[flashinfer\]"):
        attention.library()

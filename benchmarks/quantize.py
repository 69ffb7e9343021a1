"""What `qiao quantize` costs: perplexity, KL divergence, memory, beside 16 bits, rounding to nearest and other tools.

    python benchmarks/peers.py setup --peers qiao --sizes 135m     # once: SmolLM2-135M-Instruct as a 16-bit folder
    python benchmarks/quantize.py make                             # quantize it, each way; goes on where it was stopped
    python benchmarks/quantize.py reference --python ENV/bin/python     # the same with GPTQModel, from ENV
    python benchmarks/quantize.py loads --python ENV/bin/python         # what transformers computes from the files
    python benchmarks/quantize.py score --json results/quantize.json    # so does this; rows lie in CACHE/quantize/rows

Calibration: 128 samples of 192 tokens: Python's own help (``pydoc_data.topics``), torch's docstrings, two novels
(``data/calibration.txt``), this project's Chinese README, and what the model wrote itself from the beginnings in
``data/beginnings.txt``. Scored is other text: prose by other authors (``data/en.txt``, ``data/heldout.txt``), and
numpy's docstrings. Weights are dequantized at load and multiplied in float32, so that the figures are those of the
files and not of a plugin's kernels. Beside each folder its report has a digest of the settings and of the calibration
file that it was made from: ``make``, ``reference``, ``loads`` and ``score`` refuse a folder that was made from
others. Other tools get a quarter of the same ``calibration.jsonl``, which ``make`` writes, and so does Qiao beside
them; only the first layers are quantized then. ``--extra NAME=FOLDER`` scores a folder that was made elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
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
from qiao.regress.divergence import Divergence
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

GROUP, DOC_CHUNKS = 64, 4
LENGTH = 192
SHARES = {"help": 24, "docstrings": 24, "novels": 40, "chinese": 12, "own": 28}
"""Samples of each kind."""
SAMPLES = sum(SHARES.values())
OWN = 16
"""Texts that the model writes, two samples each."""
DAMP = 0.1
LOADED = 64
"""Tokens whose logits are compared with transformers'."""
RUNS: dict[str, tuple[str, ...]] = {
    "rtn": ("--method", "rtn"),
    "gptq": ("--method", "gptq"),
    "awq-sym": ("--method", "awq", "--sym"),
    "rtn-asym": ("--method", "rtn", "--asym"),
    "gptq-asym": ("--method", "gptq", "--asym"),
    "awq": ("--method", "awq"),
}
TITLES = {
    "rtn": "rtn, symmetric",
    "gptq": "gptq, symmetric",
    "awq-sym": "awq, symmetric",
    "rtn-asym": "rtn, asymmetric",
    "gptq-asym": "gptq, asymmetric",
    "awq": "awq, asymmetric",
}
REFERENCES = {"gptqmodel-gptq-asym": ("gptq", "asym"), "gptqmodel-awq": ("awq", "asym")}
TITLES |= {"gptqmodel-gptq-asym": "GPTQModel: gptq, asymmetric", "gptqmodel-awq": "GPTQModel: awq, asymmetric"}
FIRST, EACH = {"gptq": 12, "awq": 4}, 4
"""Layers that other tools quantize for comparison, the rest staying in 16 bits, from each so-manieth sample. Qiao's
file is made from the same samples and cut to the same layers."""
PROSE, DOCS = "prose", "docstrings"


def calibration(source: Path, tokenizer: Tokenizer) -> list[str]:
    """Samples of ``LENGTH`` tokens, of each kind as many as ``SHARES`` says, spread over all that there is of it."""
    torch_names = sorted(n for n in torch.__all__ if callable(getattr(torch, n)))
    texts = {
        "help": ["\n\n".join(topics[name] for name in sorted(topics))],
        "docstrings": ["\n\n".join(inspect.getdoc(getattr(torch, n)) or "" for n in torch_names)],
        "novels": [(DATA / "calibration.txt").read_text()],
        "chinese": [(Path(__file__).parents[1] / "README.zh-CN.md").read_text()],
        "own": written_by(source),
    }
    found: list[str] = []
    for kind, count in SHARES.items():
        parts = [part for text in texts[kind] for part in pieces(text, tokenizer)]
        if len(parts) < count:
            raise SystemExit(f"{kind} gives {len(parts)} samples of {LENGTH} tokens, not {count}")
        found += [parts[i * len(parts) // count] for i in range(count)]
    return found


def pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """``text`` cut where each ``LENGTH`` tokens end; a rest is left out."""
    offsets = tokenizer.encode(text).offsets
    starts = range(0, len(offsets) - LENGTH + 1, LENGTH)
    return [text[offsets[i][0] : offsets[i + LENGTH - 1][1]] for i in starts]


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


def make(source: Path, work: Path, tokenizer: Tokenizer, only: list[str]) -> None:
    """Quantize ``source`` in each way of ``RUNS``, or in those of ``only``."""
    work.mkdir(parents=True, exist_ok=True)
    data = work / "calibration.jsonl"
    if not is_made(data, digest([SHARES, LENGTH, OWN])):
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in calibration(source, tokenizer)))
        note(data, digest([SHARES, LENGTH, OWN]))
    for name in only or RUNS:
        quantized(source, work / name, RUNS[name], data, SAMPLES)


def digest(settings: Sequence[object], data: Path | None = None) -> str:
    """Of what a folder is made from: the settings, and the calibration file where there is one."""
    state = hashlib.sha256(json.dumps([str(one) for one in settings]).encode())
    if data is not None:
        state.update(data.read_bytes())
    return state.hexdigest()[:16]


def report_of(out: Path) -> dict[str, Any]:
    """What is noted beside a folder or file; empty where nothing is."""
    report = out.with_suffix(".json")
    found: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}
    return found


def note(out: Path, made_from: str, **more: Any) -> None:
    """Write the report beside ``out``."""
    out.with_suffix(".json").write_text(json.dumps({**more, "made_from": made_from}, indent=1))


def is_made(out: Path, wanted: str) -> bool:
    """Whether ``out`` is done. Ends the program where it was made from something else than ``wanted`` says."""
    if not (out.is_file() or (out / "config.json").is_file()):
        return False
    found = report_of(out).get("made_from")
    if found != wanted:
        raise SystemExit(
            f"{out} was made from other settings or another calibration file ({found}, not {wanted}); "
            "remove it to make it again, or name another folder with --work"
        )
    return True


def settings_of(flags: tuple[str, ...], data: Path, samples: int) -> tuple[list[object], str]:
    """Flags of ``qiao quantize``, and the digest of them and of what they read."""
    if "rtn" in flags:
        given: list[object] = [*flags, "--group", GROUP]
        return given, digest(given)
    given = [*flags, "--group", GROUP, "--samples", samples, "--length", LENGTH]
    return [*given, "--calibration", data], digest(given, data)


def quantized(source: Path, out: Path, flags: tuple[str, ...], data: Path, samples: int) -> None:
    """``qiao quantize`` into ``out``, unless that is done; beside it its report with the peak of memory."""
    given, made_from = settings_of(flags, data, samples)
    if is_made(out, made_from):
        return
    command = [sys.executable, "-m", "qiao", "quantize", source, *given, "--json", "-o", out]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{out.name}: qiao quantize ended with {process.returncode}")
    report = json.loads(output) | {"peak_bytes": usage.ru_maxrss * 1024}
    del report["errors"], report["output"]
    note(out, made_from, **report)


def reference(source: Path, work: Path, python: Path) -> None:
    """The same data and settings through GPTQModel, run by ``python`` of its environment, and through Qiao."""
    script = Path(__file__).parent / "comparison" / "scripts" / "quantize_gptqmodel.py"
    lines = (work / "calibration.jsonl").read_text().splitlines(keepends=True)[::EACH]
    data = work / "reference.jsonl"
    data.write_text("".join(lines))
    for name, (method, form) in REFERENCES.items():
        quantized(source, work / ours_for(name), ("--method", method, f"--{form}"), data, len(lines))
        given = [method, form, GROUP, DAMP, LENGTH, FIRST[method]]
        if not is_made(work / name, digest(given, data)):
            subprocess.run([*map(str, [python, script, source, data, work / name, *given])], check=True)
            note(work / name, digest(given, data))


def ours_for(reference: str) -> str:
    """The name of Qiao's folder that is made like that of another tool."""
    return reference.replace("gptqmodel-", "beside-")


def first_layers(source: Path, quantized: Path, folder: Path, count: int) -> Path:
    """``folder`` with the first ``count`` layers of ``quantized``, dequantized, and the others of ``source``."""
    made_from = digest([report_of(quantized).get("made_from"), count])
    if not is_made(folder, made_from):
        held = dict(iter_weights(resolve(quantized), progress=False, dequantize=True))
        inner = re.compile(r"model\.layers\.(\d+)\.")
        plain = dict(iter_weights(resolve(source), progress=False))
        chosen = {n: held[n] if (m := inner.match(n)) and int(m[1]) < count else x for n, x in plain.items()}
        write_float(source, chosen, folder)
        note(folder, made_from)
    return folder


def in_float16(source: Path, quantized: Path, folder: Path) -> Path:
    """``folder`` with ``quantized`` dequantized and each weight of a linear layer rounded to float16."""
    made_from = digest([report_of(quantized).get("made_from"), "float16"])
    if not is_made(folder, made_from):
        held = dict(iter_weights(resolve(quantized), progress=False, dequantize=True))
        write_float(source, {n: x.half() if n.endswith("_proj.weight") else x for n, x in held.items()}, folder)
        note(folder, made_from)
    return folder


def write_float(source: Path, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """``folder``: that of ``source`` with ``tensors`` as its weights, in float32."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(
        {name: x.float().contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def loads(source: Path, work: Path, python: Path, tokenizer: Tokenizer) -> None:
    """Logits of transformers (with GPTQModel, run by ``python``) for the files that were made, beside Qiao's: of the
    weights as the format defines them, and of those rounded to float16, which is what GPTQModel multiplies by."""
    script = Path(__file__).parent / "comparison" / "scripts" / "transformers_logits.py"
    ids = tokenizer.encode((DATA / "en.txt").read_text()).ids[:LOADED]
    (work / "ids.json").write_text(json.dumps(ids))
    found = {}
    for name, plain in (("gptq-asym", "torch"), ("awq", "torch_awq")):
        if not is_made(work / name, settings_of(RUNS[name], work / "calibration.jsonl", SAMPLES)[1]):
            raise SystemExit(f"{work / name} is not there; make it first")
        halves = in_float16(source, work / name, work / f"{name}-float16")
        ours = {kind: logits_of(folder, ids) for kind, folder in (("exact", work / name), ("rounded", halves))}
        for backend in (plain, "auto"):
            out = work / f"{name}-{backend}.logits.safetensors"
            command = (python, script, work / name, work / "ids.json", out, backend)
            subprocess.run([str(x) for x in command], check=True)
            with safe_open(out, framework="pt") as handle:
                other, modules = handle.get_tensor("logits"), handle.metadata()["modules"]
            row: dict[str, Any] = {"modules": modules}
            for kind, mine in ours.items():
                row[kind] = {
                    "largest": float((mine - other).abs().max()),
                    "relative": float((mine - other).norm() / other.norm()),
                    "same_top": 100 * float((mine.argmax(-1) == other.argmax(-1)).float().mean()),
                }
            found[f"{name}, {backend}"] = row
            print(name, backend, row, flush=True)
    (work / "loads.json").write_text(json.dumps(found, indent=1))


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """[T, V] float32 of Qiao in float32, with the weights dequantized at load."""
    llm = LLM(str(folder), device="cpu", dtype="float32", quantization="none", max_model_len=CHUNK)
    return torch.cat(list(llm.token_logits(ids, 0)))[: len(ids)]


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
        self._kept = work / "rows"
        self._kept.mkdir(exist_ok=True)
        texts = {PROSE: "".join((DATA / f"{n}.txt").read_text() for n in ("en", "heldout")), DOCS: docstrings()}
        self._chunks = {name: list(chunks_of(tokenizer.encode(text).ids, CHUNK)) for name, text in texts.items()}
        self._chunks[DOCS] = self._chunks[DOCS][:: max(1, len(self._chunks[DOCS]) // DOC_CHUNKS)][:DOC_CHUNKS]
        kept = self._kept / "base.pt"
        if not kept.is_file():
            base = Scorer(source, dtype="float32")
            torch.save({name: [base.logits(c) for c in chunks] for name, chunks in self._chunks.items()}, kept)
        self._base: dict[str, list[torch.Tensor]] = torch.load(kept, weights_only=True)
        self._source, self._whole = source, linear_bytes(source)
        self.rows = [self._row("16 bits", self._figures(list(self._base.values())), source)]

    def add(self, title: str, folder: Path, **arguments: Any) -> None:
        """Score ``folder``, unless an earlier run did and it is still the same one; ``arguments`` are fields of
        ``EngineArgs``.
        """
        kept = self._kept / f"{title}.json"
        made = report_of(folder).get("made_from")
        if not kept.is_file() or json.loads(kept.read_text())["made"].get("made_from") != made:
            scorer = Scorer(folder, dtype="float32", **arguments)
            logits = [[scorer.logits(chunk) for chunk in chunks] for chunks in self._chunks.values()]
            kept.write_text(json.dumps(self._row(title, self._figures(logits), folder)))
        self.rows.append(json.loads(kept.read_text()))
        print(title, {name: round(f["perplexity"], 3) for name, f in self.rows[-1]["texts"].items()}, flush=True)

    def _figures(self, logits: list[list[torch.Tensor]]) -> dict[str, dict[str, Any]]:
        """Of each text; ``logprobs`` are the next tokens' own."""
        found: dict[str, dict[str, Any]] = {}
        for (name, chunks), others in zip(self._chunks.items(), logits, strict=True):
            totals = Totals()
            for chunk, base, other in zip(chunks, self._base[name], others, strict=True):
                totals.add(base, other, torch.tensor(chunk)[scored(CHUNK).start + 1 :])
            joined = Divergence.joined(totals.parts)
            found[name] = totals.figures() | {"logprobs": [round(float(x), 5) for x in joined.logprob]}
        return found

    def _row(self, title: str, figures: dict[str, dict[str, float]], folder: Path) -> dict[str, Any]:
        made = report_of(folder)
        size = linear_bytes(folder)
        return {"title": title, "linear_bytes": size, "share": size / self._whole, "texts": figures, "made": made}


def beside(rows: list[dict[str, Any]]) -> None:
    """To each row of gptq and awq how much better each text is foretold than by rounding to nearest, and the standard
    error of that mean, in nats a token; to each of another tool and of Qiao beside it the ratio of perplexities."""
    by_title = {row["title"]: row for row in rows}
    for row in rows:
        method, _, form = row["title"].partition(", ")
        rounded = by_title.get(f"rtn, {form}")
        if method in ("gptq", "awq") and rounded is not None:
            for name, f in row["texts"].items():
                gain = numpy.subtract(f["logprobs"], rounded["texts"][name]["logprobs"])
                f["better_than_rtn"] = [float(gain.mean()), float(gain.std(ddof=1) / math.sqrt(len(gain)))]
        other = by_title.get(row["title"].replace("Qiao: ", "GPTQModel: "))
        if other is not None and other is not row:
            for name, f in row["texts"].items():
                gain = numpy.subtract(f["logprobs"], other["texts"][name]["logprobs"])
                f["of_reference"] = f["perplexity"] / other["texts"][name]["perplexity"]
                f["of_reference_error"] = float(gain.std(ddof=1) / math.sqrt(len(gain)))
    for row in rows:
        for f in row["texts"].values():
            del f["logprobs"]


def render(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    each = ("perplexity", "nats better than rtn", "KL", "same first token")
    head = ("", *(f"{t}: {f}" for t in (PROSE, DOCS) for f in each), "size")
    lines = []
    for row in rows:
        cells = []
        for name in (PROSE, DOCS):
            f = row["texts"][name]
            error = f["kl_error"] if math.isfinite(f["kl_error"]) else 0.0
            gain = "{:.3f} ± {:.3f}".format(*f["better_than_rtn"]) if "better_than_rtn" in f else ""
            cells += [f"{f['perplexity']:.2f}", gain, f"{f['kl']:.4f} ± {error:.4f}", f"{f['same_top']:.1f} %"]
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
        data = work / "calibration.jsonl"
        for name in RUNS:
            if is_made(work / name, settings_of(RUNS[name], data, SAMPLES)[1]):
                made.add(TITLES[name], work / name, quantization="none")
        for name in REFERENCES:
            ours = ours_for(name)
            if all((work / n / "config.json").is_file() for n in (name, ours)):
                count = FIRST[REFERENCES[name][0]]
                for title, folder in ((TITLES[name].replace("GPTQModel", "Qiao"), ours), (TITLES[name], name)):
                    cut = first_layers(source, work / folder, work / f"{folder}-first", count)
                    made.add(f"first {count} layers, {title}", cut)
        for item in extra:
            name, _, folder = item.partition("=")
            made.add(name, Path(folder), quantization="none")
        made.add("16 bits, int8 KV cache", source, kv_cache_dtype="int8")
    beside(made.rows)
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "group": GROUP,
        "samples": SHARES,
        "length": LENGTH,
        "damp": DAMP,
        "chunk": CHUNK,
        "reference": {"layers": FIRST, "samples": -(-SAMPLES // EACH)},
        "rows": made.rows,
        "loads": json.loads((work / "loads.json").read_text()) if (work / "loads.json").is_file() else {},
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(data, indent=1) + "\n")
    print(render(made.rows))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "reference", "loads", "score", "report"))
    parser.add_argument("--python", type=Path, help="reference, loads: the interpreter of one with GPTQModel")
    parser.add_argument("--cache", help="where `peers.py setup` put the models; ~/.cache/qiao-bench if not given")
    parser.add_argument("--work", type=Path, help="where the quantized models lie; CACHE/quantize if not given")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"make: of {', '.join(RUNS)}")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=FOLDER", help="score this folder too")
    parser.add_argument("--json", type=Path, default=Path("results/quantize.json"))
    asked = parser.parse_args()
    cache = Place.of(asked.cache)
    source, work = cache.model("135m", "hf"), asked.work or cache.root / "quantize"
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if asked.what == "make":
        make(source, work, tokenizer, [name for name in asked.only.split(",") if name])
    elif asked.what in ("reference", "loads"):
        if asked.python is None:
            parser.error(f"{asked.what} needs --python")
        if asked.what == "reference":
            reference(source, work, asked.python)
        else:
            loads(source, work, asked.python, tokenizer)
    elif asked.what == "score":
        score(source, work, tokenizer, asked.extra, asked.json)
    if asked.what in ("score", "report"):
        rows = json.loads(asked.json.read_text())["rows"]
        plot(rows, asked.json.with_suffix(".png"))
        print(render(rows))


if __name__ == "__main__":
    main()

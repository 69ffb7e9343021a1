"""``qiao quantize``: a model in 2 to 8 bits, made here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qiao.errors import ParameterError

if TYPE_CHECKING:
    from rich.progress import Progress

    from qiao.loading import ModelFiles
    from qiao.quantize import Device, Options, Report


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a hub name; not quantized.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; an unfinished run is resumed.")],
    method: Annotated[str, typer.Option("--method", help="gptq, awq, or rtn (to the nearest, without data).")] = "gptq",
    bits: Annotated[int, typer.Option("--bits", help="2, 3, 4 or 8; awq: 4.")] = 4,
    group: Annotated[int, typer.Option("--group", help="Inputs that share a scale: 32, 64, 128, or -1.")] = 128,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help='JSON Lines: {"text": ...} or {"messages": [...]}.')
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="How many lines to draw.")] = 128,
    length: Annotated[int, typer.Option("--length", help="Most tokens of a sample.")] = 512,
    sym: Annotated[
        bool | None, typer.Option("--sym/--asym", help="Zero in the middle or not; gptq and rtn: sym, awq: asym.")
    ] = None,
    act_order: Annotated[
        str, typer.Option("--act-order", help="gptq: static, group (g_idx, slower to serve), none.")
    ] = "static",
    damp: Annotated[float, typer.Option("--damp", help="gptq: share of the mean diagonal that is added.")] = 0.1,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of lines.")] = 0,
    device: Annotated[str, typer.Option("--device", help="Where calibration runs: auto or a plugin's name.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a model layer by layer into a folder that Qiao, vLLM and transformers load."""
    from qiao.loading import load_tokenizer, resolve
    from qiao.quantize import Options, read_samples
    from qiao.quantize import quantize as run

    options = Options(
        method=method,
        bits=bits,
        group=group,
        symmetric=sym,
        act_order=act_order,
        damp=damp,
        samples=samples,
        length=length,
        seed=seed,
    )
    if options.calibrated and calibration is None:
        raise ParameterError("--calibration", f"{method} needs a JSON Lines file of texts; --method rtn does without")
    files = resolve(model)
    sequences: list[list[int]] = []
    if calibration is not None and options.calibrated:
        sequences = read_samples(calibration, load_tokenizer(files), samples, length, seed)
        if len(sequences) < samples:
            print(f"qiao: {calibration} gives {len(sequences)} samples, not {samples}", file=sys.stderr)
    place = _place(files, options, device)
    with _progress() as bar:
        report = run(files, output, options, place, sequences, _shower(bar, method))
    print(json.dumps(report.as_dict(), indent=2) if as_json else _render(report))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("quantize")(quantize)


def _place(files: ModelFiles, options: Options, device: str) -> Device:
    """Operators on ``device``; activations in float32 where it has that, else in the model's own dtype."""
    from dataclasses import replace

    from qiao.build import dtype_of, place
    from qiao.config import EngineArgs
    from qiao.loading import load_config
    from qiao.models.placing import shape_for
    from qiao.quantize import Device
    from qiao.registry import FallbackCounters, choose

    args, backend = EngineArgs(model=files.name, device=device), choose(device)
    shape = shape_for(load_config(files), "auto", backend.capabilities)
    if "float32" in backend.capabilities.dtypes:
        shape = replace(shape, dtype="float32")
    plan, ops = place(shape, backend, args, FallbackCounters())
    return Device(ops, dtype_of(shape.dtype), plan.block_size)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    return Progress(
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[error]}"),
        console=Console(stderr=True),
    )


def _shower(bar: Progress, method: str) -> Callable[[int, int, float | None], None]:
    task = bar.add_task(f"{method}: layers", total=None, error="")

    def show(done: int, total: int, error: float | None) -> None:
        text = "" if error is None else f"error {error:.2e}"
        bar.update(task, completed=done, total=total, error=text)

    return show


def _render(report: Report) -> str:
    kind = "weights" if report.method == "rtn" else "outputs"
    worst = max(report.errors, key=lambda row: float(row["error"]))
    resumed = f", {report.resumed} of them from an earlier run" if report.resumed else ""
    few = f"\n{len(report.to_nearest)} linear layers of experts saw too few tokens and were rounded to nearest"
    share = 100 * report.bytes_after / report.bytes_before
    return (
        f"{report.output}: {len(report.errors)} layers by {report.method} in {report.seconds:.0f} s{resumed}\n"
        f"linear weights: {report.bytes_before / 1e6:.1f} MB to {report.bytes_after / 1e6:.1f} MB ({share:.1f} %)\n"
        f"squared error over squared {kind}: mean {report.mean_error:.2e}, worst {worst['error']:.2e} "
        f"(layer {worst['layer']}){few if report.to_nearest else ''}"
    )

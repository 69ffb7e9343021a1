"""``qiao plan``: what would run where, and what that costs, from a config alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qiao.cli.options import with_engine_options
from qiao.config import EngineArgs, dtype_name
from qiao.errors import ModelError, ParameterError

if TYPE_CHECKING:
    from qiao.contract import ModelShape, StepShape
    from qiao.loading import ModelFiles
    from qiao.quantization import Method, QuantizedWeight
    from qiao.registry import Plan, Price


ENGINE = (
    *("device", "fallback", "fallback_budget", "drop", "dtype", "quantization", "kv_cache_dtype", "block_size"),
    *("revision", "hf_overrides", "enable_lora", "max_loras", "max_lora_rank"),
)
"""What ``serve`` takes that changes a plan."""


@with_engine_options(*ENGINE)
def plan(
    model: Annotated[str, typer.Option("--model", help="config.json, a folder, a GGUF file, or a hub name.")],
    engine: dict[str, Any],
    chip: Annotated[str, typer.Option("--chip", help="A chip that the plugin knows; its usual one if empty.")] = "",
    keep: Annotated[list[str] | None, typer.Option("--keep", help="Price a group's state kept on the device.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in the step.")] = 32,
    context: Annotated[int, typer.Option("--context", min=1, help="Cached tokens of each sequence.")] = 2048,
    prefill: Annotated[int | None, typer.Option("--prefill", min=1, help="New tokens in the step, all told.")] = None,
    bandwidth: Annotated[float, typer.Option("--bandwidth", min=0.001, help="Assumed bus speed, GB/s.")] = 25.0,
    sync_us: Annotated[float, typer.Option("--sync-us", min=0.0, help="Assumed time of one wait, us.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show where each operator of a model would run and what a step would copy. Needs no weights and no device."""
    from qiao.registry import Policy, Rates, make_plan, planning_backend, to_dequantize

    args = EngineArgs(model=model, **engine)
    policy, backend = Policy.parse(args.fallback, args.fallback_budget), planning_backend(args.device, chip=chip)
    lost, more = frozenset[str](), frozenset({""})
    while more:
        shape, assumption = read_shape(args, lost)
        made = make_plan(
            shape,
            backend,
            policy,
            drop=args.drop,
            keep=_split(keep),
            block_size=args.block_size,
            rates=Rates(bandwidth * 1e9, sync_us * 1e-6),
        )
        more = to_dequantize(made, policy) - lost
        lost |= more
    made = replace(made, step=_step(batch, context, prefill, made.block_size))
    data = {**made.as_dict(), "assumption": assumption}
    if as_json:
        json.dump(data, sys.stdout, indent=2)
        print()
    else:
        _show(made, assumption)
    if data["refused"]:
        print(f"qiao: {data['refused']}", file=sys.stderr)
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def read_shape(args: EngineArgs, dequantized: AbstractSet[str] = frozenset()) -> tuple[ModelShape, str]:
    """The shape of a model, and what was assumed of it, empty where its weights' own headers say all.

    ``args.model`` is a ``config.json`` or whatever ``serve`` takes; of a model on the Hugging Face hub only the config
    is fetched. A quantized config alone does not say which layers are quantized: all are taken to be, but the head and
    what routes to experts. Weights of the schemes ``dequantized`` become floating point at load. Raises ``ModelError``
    naming the file, ``ParameterError`` for a quantization that it has not.
    """
    from qiao.models import describe
    from qiao.models.adapters import with_adapters

    config, files = _read_model(args)
    config = {**config, **args.hf_overrides}
    method = _method(args, config, files)
    if method is None or files is not None:
        held = _promised(files) if method else {}
        kept = {name: weight for name, weight in held.items() if weight.form.scheme not in dequantized}
        shape, assumption = describe(config, kept), ""
    else:
        shape, assumption = _all_quantized(describe(config), method, dequantized)
    if args.dtype != "auto":
        shape = replace(shape, dtype=dtype_name(args.dtype))
    if args.kv_cache_dtype != "auto":
        shape = replace(shape, kv_dtype=args.kv_cache_dtype)
    if args.enable_lora:
        shape = with_adapters(shape, args.max_loras, args.max_lora_rank)
    return shape, assumption


def _read_model(args: EngineArgs) -> tuple[dict[str, Any], ModelFiles | None]:
    """The config, and the files where the model itself is here."""
    from qiao.loading import read_raw_config, resolve

    path, model = Path(args.model), args.model
    if path.suffix == ".json":
        return _read_json(path), None
    if path.exists() or model.startswith(("pypi:", "modelscope:")) or path.suffix == ".gguf" or model.count("/") != 1:
        if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
            return _read_json(path / "config.json"), None
        files = resolve(model, args.revision)
        return read_raw_config(files), files
    return _read_json(_hub_config(model, args.revision)), None


def _method(args: EngineArgs, config: dict[str, Any], files: ModelFiles | None) -> str | Method | None:
    """The method to price, None where weights are or become floating point; checked against ``--quantization``."""
    from qiao.loading import quantization_of
    from qiao.quantization import method_of, settings_of

    settings = settings_of(config)
    found: str | Method | None = quantization_of(files) if files is not None else None
    if files is None and settings is not None:
        found = method_of(settings)
    name = found if isinstance(found, str) or found is None else found.name
    if args.quantization not in (None, "none", name):
        raise ParameterError(
            "--quantization", f"{args.quantization!r} was asked for, but the model is {name or 'not quantized'}"
        )
    return None if args.quantization == "none" else found


def _promised(files: ModelFiles | None) -> Mapping[str, QuantizedWeight]:
    from qiao.loading import quantized_weights

    return {} if files is None else quantized_weights(files)


def _all_quantized(shape: ModelShape, method: str | Method, dequantized: AbstractSet[str]) -> tuple[ModelShape, str]:
    """``shape`` with each layer that is usually quantized in the form that ``method`` gives it, or floating point."""
    assert not isinstance(method, str)  # GGUF files are here, whole
    linears = []
    for line in shape.linears:
        form = None if line.name in _PLAIN else method.form(f"model.layers.0.{line.name}", line.in_features)
        if form is None or form.scheme in dequantized:
            linears.append(line)
        else:
            linears.append(replace(line, scheme=form.scheme, group_size=form.group_size))
    text = (
        f"the config says {method.name}, and only the headers of the weights show which layers are quantized: taken to "
        "be all but the head and routers"
    )
    return replace(shape, linears=tuple(linears)), text


_PLAIN = ("lm_head", "router", "shared_expert_gate")
"""Linear layers, by the names of ``ModelShape``, that checkpoints leave in floating point."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: not found; --model takes a config.json, a folder, a GGUF file or a hub name"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, holds a {type(data).__name__}")
    return data


def _hub_config(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{model}: no such file or folder here, and no config from the hub ({type(error).__name__}: {error}); "
            "give the path of a config.json"
        ) from error


def _split(items: list[str] | None) -> list[str]:
    return [name.strip() for item in items or () for name in item.split(",") if name.strip()]


def _step(batch: int, context: int, prefill: int | None, block_size: int) -> StepShape:
    from qiao.contract import StepShape

    if prefill is not None and prefill < batch:
        raise ParameterError("--prefill", f"must be at least --batch ({batch}): each sequence has a new token")
    return StepShape(prefill or batch, batch, batch, context, -(-context // block_size))


def _show(made: Plan, assumption: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qiao.registry.report import amounts, remarks, shown

    price = made.price()
    title = f"{made.shape.architecture} ({made.shape.dtype}) on {made.device}, {made.step_text}"
    table = Table(title=title, title_justify="left")
    for name in ("operator", "group", "runs on", "calls", "to host", "to device", "ms"):
        table.add_column(name, justify="left" if name in ("operator", "group", "runs on") else "right", no_wrap=True)

    def add(name: str, group: str, place: str, part: Price) -> None:
        table.add_row(*(Text(cell) for cell in (name, group, place, *amounts(part, made.rates))))

    for row in price.rows:
        if shown(row):
            add(row.operator, row.group, row.place, row.price)
    table.add_section()
    for name, part in (("inputs", price.inputs), ("outputs", price.outputs), ("total", price.total)):
        add(name, "", "", part)
    console = Console()
    console.print(table)
    for note in ([assumption] if assumption else []) + list(remarks(made)):
        if not note.startswith("REFUSED"):
            console.print(f"- {note}", markup=False, highlight=False)

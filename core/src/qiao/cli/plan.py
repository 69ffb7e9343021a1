"""``qiao plan``: what would run where, and what that costs, from a config alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qiao.errors import ModelError, ParameterError

if TYPE_CHECKING:
    from qiao.contract import ModelShape, StepShape
    from qiao.quantization import QuantizedWeight
    from qiao.registry import Plan, Price


def plan(
    model: Annotated[str, typer.Option("--model", help="config.json, a folder, a GGUF file, or a hub name.")],
    device: Annotated[str, typer.Option("--device", help="auto, a plugin's name, or a torch device.")] = "auto",
    chip: Annotated[str, typer.Option("--chip", help="A chip that the plugin knows; its usual one if empty.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="auto (the config's), float32, bfloat16, float16.")] = "auto",
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="Hooks or groups to leave unused; repeatable.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option("--keep", help="Price a group's state kept on the device.")] = None,
    fallback: Annotated[str, typer.Option("--fallback", help="allow, warn or deny, then name=policy items.")] = "warn",
    fallback_budget: Annotated[str | None, typer.Option("--fallback-budget", help="Bytes a step: 64MiB.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in the step.")] = 32,
    context: Annotated[int, typer.Option("--context", min=1, help="Cached tokens of each sequence.")] = 2048,
    prefill: Annotated[int | None, typer.Option("--prefill", min=1, help="New tokens in the step, all told.")] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", min=1, help="Tokens in a KV block.")] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="auto (the model's), float32, bfloat16, float16, int8.")
    ] = "auto",
    bandwidth: Annotated[float, typer.Option("--bandwidth", min=0.001, help="Assumed bus speed, GB/s.")] = 25.0,
    sync_us: Annotated[float, typer.Option("--sync-us", min=0.0, help="Assumed time of one wait, us.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show where each operator of a model would run and what a step would copy. Needs no weights and no device."""
    from qiao.registry import Policy, Rates, make_plan, planning_backend
    from qiao.server.values import parse_int

    shape = with_kv_dtype(read_shape(model, dtype), kv_cache_dtype)
    budget = None if fallback_budget is None else parse_int("--fallback-budget", fallback_budget)
    policy = Policy.parse(fallback, budget)
    made = make_plan(
        shape,
        planning_backend(device, chip=chip),
        policy,
        drop=_split(drop),
        keep=_split(keep),
        block_size=block_size,
        rates=Rates(bandwidth * 1e9, sync_us * 1e-6),
    )
    made = replace(made, step=_step(batch, context, prefill, made.block_size))
    data = made.as_dict()
    if as_json:
        json.dump(data, sys.stdout, indent=2)
        print()
    else:
        _show(made)
    if data["refused"]:
        print(f"qiao: {data['refused']}", file=sys.stderr)
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def read_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a model from its config: a ``.json`` file, or whatever ``serve`` takes.

    Of a model on the Hugging Face hub only the config is fetched. ``dtype`` replaces the config's own unless it is
    ``auto``.
    Raises ``ModelError`` naming the file, ``ParameterError`` for an unknown dtype.
    """
    from qiao.models import describe

    shape = describe(*_read_model(model))
    if dtype == "auto":
        return shape
    name = dtype.removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    if name not in ("float32", "bfloat16", "float16"):
        raise ParameterError("--dtype", f"must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return replace(shape, dtype=name)


def with_kv_dtype(shape: ModelShape, name: str) -> ModelShape:
    """``shape`` with the KV cache's dtype. Raises ``ParameterError`` for an unknown one."""
    from qiao.config import KV_DTYPES

    if name not in KV_DTYPES:
        raise ParameterError("--kv-cache-dtype", f"must be one of {', '.join(KV_DTYPES)}, got {name!r}")
    return shape if name == "auto" else replace(shape, kv_dtype=name)


def _read_model(model: str) -> tuple[dict[str, Any], Mapping[str, QuantizedWeight]]:
    """The config, and the quantized weights where the model itself is here."""
    from qiao.loading import quantized_weights, read_raw_config, resolve

    path = Path(model)
    if path.suffix == ".json":
        return _unquantized(_read_json(path)), {}
    if path.exists() or model.startswith(("pypi:", "modelscope:")) or path.suffix == ".gguf" or model.count("/") != 1:
        if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
            return _unquantized(_read_json(path / "config.json")), {}
        files = resolve(model)
        return read_raw_config(files), quantized_weights(files)
    return _unquantized(_read_json(_hub_config(model))), {}


def _unquantized(config: dict[str, Any]) -> dict[str, Any]:
    """``config``, unless it is that of a quantized model, which does not say by itself what is quantized."""
    from qiao.quantization import method_of, settings_of

    settings = settings_of(config)
    if settings is not None:
        raise ModelError(
            f"the config is of a model quantized by {method_of(settings).name}, and only the headers of its weights "
            "show which layers are; give the folder that has both"
        )
    return config


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


def _hub_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
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


def _show(made: Plan) -> None:
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
    for note in remarks(made):
        if not note.startswith("REFUSED"):
            console.print(f"- {note}", markup=False, highlight=False)

"""Writes the pages of ``docs/`` that follow from code: ``python -m tools.docs``, or ``--check`` to fail on drift."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qiao.contract import CATALOG, CONTRACT_VERSION, GROUP, SPECS, OpSpec

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by `python -m tools.docs` (make docs); change the code that it names, not this page. -->\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; ``|`` in cells is escaped."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0])]
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def prose(text: str | None) -> str:
    """A docstring as Markdown: reStructuredText's double backquotes become single ones."""
    return (inspect.cleandoc(text) if text else "").replace("``", "`")


# hooks ---------------------------------------------------------------------------------------------------------------


EACH_STEP = {
    "attention": "once for each attention layer",
    "linear": "once for each linear layer",
    "step": "once",
    "light": "as often as the model's layers need it",
}
"""``OpSpec.per`` in words; the other hooks run at start or where the engine finds a use for them."""


def tolerances(op: OpSpec) -> str:
    """The tolerance per dtype in one line."""
    if not op.tolerance:
        return "-"
    return ", ".join(
        f"{dtype} exact" if t.atol == t.rtol == 0 else f"{dtype} {t.atol:g} + {t.rtol:g}·abs"
        for dtype, t in op.tolerance.items()
    )


def hook_section(op: OpSpec, function: Callable[..., Any]) -> str:
    """One hook: signature, facts from the catalog, docstring of its specification."""
    parameters = [f"{name}: {kind}" for name, kind in function.__annotations__.items() if name != "return"]
    signature = f"def {op.name}({', '.join(parameters)}) -> {function.__annotations__['return']}"
    facts = [
        ("optional" if op.optional else "required")
        + (f", replaces `{op.replaces}`" if op.replaces else "")
        + (f"; placement group {op.group}" if op.group else "; no placement group: it stays with the device"),
        *([f"called in each step, {EACH_STEP[op.per]}"] if op.per in EACH_STEP else []),
        "may change: " + (", ".join(f"`{name}`" for name in op.mutates) or "nothing"),
        f"tolerance: {tolerances(op)}",
    ]
    body = prose(function.__doc__)
    return f"### {op.name}\n\n```python\n{signature}\n```\n\n{body}\n\n" + "".join(f"- {fact}\n" for fact in facts)


def hooks_page() -> str:
    """``docs/reference/hooks.md`` from the catalog and the specifications."""
    parts = [
        NOTE,
        f"# Hooks of contract {CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}\n",
        f"Entry-point group `{GROUP}`. Letters in shapes and the records: see [Records](#records).\n",
        table(
            ("hook", "family", "group", "optional", "in each step"),
            (
                (
                    f"[{op.name}](#{op.name})",
                    op.family,
                    op.group or "-",
                    "yes" if op.optional else "",
                    EACH_STEP.get(op.per, ""),
                )
                for op in CATALOG.values()
            ),
        ),
    ]
    for spec in SPECS:
        module = sys.modules[spec.__module__]
        parts.append(f"## {spec.__name__.removesuffix('Spec')}\n\n{prose(module.__doc__)}\n\n{prose(spec.__doc__)}\n")
        names = [name for name in vars(spec) if name in CATALOG]
        parts += [hook_section(CATALOG[name], getattr(spec, name)) for name in names]
    parts.append(f"## Records\n\n{prose(sys.modules['qiao.contract.types'].__doc__)}\n")
    parts += [f"### {name}\n\n{record_text(name)}\n" for name in record_names()]
    return "\n".join(parts)


def record_names() -> list[str]:
    """Public classes of ``qiao.contract.types`` in the order of the file."""
    module = sys.modules["qiao.contract.types"]
    return [
        name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def record_text(name: str) -> str:
    """A record's docstring and fields."""
    record = getattr(sys.modules["qiao.contract.types"], name)
    fields = ", ".join(f"`{key}: {kind}`" for key, kind in inspect.get_annotations(record).items())
    return f"{prose(record.__doc__)}\n\n" + (f"Fields: {fields}." if fields else "No fields.")


# metrics -------------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """``docs/reference/metrics.md`` from a scrape of an idle server's registry."""
    from prometheus_client.parser import text_string_to_metric_families
    from qiao.engine.request import EngineStats, FallbackCount, OffloadStats
    from qiao.observability.metrics import Metrics, ServerMetrics

    stats = EngineStats(
        utilization=0.0,
        prompt_budget=0,
        fallbacks=[FallbackCount("attention")],
        running_adapters=[],
        offload=OffloadStats(),
    )
    metrics = ServerMetrics()
    metrics.models["m"] = Metrics("m", lambda: [stats], max_model_len=2048, cache_info={"block_size": "16"})
    text, _ = metrics.render()
    rows = sorted(
        (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
        for family in text_string_to_metric_families(text.decode())
        if not re.search(r"_created$|^(python|process)_", family.name)
    )
    intro = (
        "What `GET /metrics` shows, besides the usual `process_*` and `python_*`. Names that start with `vllm:` mean "
        "what they mean in vLLM, so that its dashboards work; `qiao:` names are Qiao's own. The engine's counters "
        "restart from zero with the engine.\n"
    )
    return "\n".join((NOTE, "# Metrics\n", intro, table(("name", "type", "meaning"), rows)))


# command line --------------------------------------------------------------------------------------------------------


def commands() -> Mapping[str, Any]:
    """The subcommands as typer built them."""
    import typer
    from qiao.cli.main import build_app

    found = {}
    for name, command in typer.main.get_group(build_app()).commands.items():
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {part}": inner[part] for part in inner}
    return found


def cli_page() -> str:
    """``docs/reference/cli.md`` from the typer commands and the server's parser."""
    parts = [
        NOTE,
        "# Command line\n",
        "Exit status: 0 done, 1 failed, 2 something that you can mend. `QIAO_DEBUG=1` shows tracebacks.\n",
    ]
    for name, command in commands().items():
        parts.append(f"## qiao {name}\n\n{command.help or command.callback.__doc__}\n")
        if name == "serve":
            parts += serve_sections()
            continue
        rows = [
            (
                ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
                if p.param_type_name == "option"
                else p.name.upper(),
                getattr(p, "help", None) or "",
            )
            for p in command.params
        ]
        parts.append(table(("argument", "meaning"), rows))
    return "\n".join(parts)


def dashes(names: Iterable[str]) -> str:
    """Flags as people write them."""
    return ", ".join(f"`--{name.replace('_', '-')}`" for name in names)


def serve_sections() -> list[str]:
    """The server's flags from the fields that they set, then the other spellings."""
    from qiao.server.flags import flags
    from qiao.server.flagtext import FLAG_TEXT
    from qiao.vllm_arguments import ALIASES, FIXED, IGNORED, SHORT

    parts = [
        "`-` and `_` are the same; booleans also as `--no-X`; sizes as `4096`, `32k` or `64MiB`; JSON flags also as "
        "`--flag.key VALUE`; `--config FILE.yaml` holds flags, and the command line wins.\n"
    ]
    for title, owner in (("Engine", "EngineArgs"), ("Server", "ServerArgs")):
        rows = []
        for flag in flags().values():
            if flag.owner.__name__ == owner and flag.name != "model":
                default = (
                    {True: "on", False: "off"}.get(flag.default, flag.default) if flag.kind == "bool" else flag.default
                )
                shown = "" if default in (None, {}, (), "") else f"`{default}`"
                rows.append((f"`{flag.option}`", shown, FLAG_TEXT[flag.name]))
        parts += [f"### {title}\n", table(("flag", "default", "meaning"), rows)]
    parts.append("### Other spellings of vLLM\n")
    spellings = [
        *SHORT.items(),
        *((dashes([old]).strip("`"), dashes([new]).strip("`")) for old, new in ALIASES.items()),
    ]
    parts.append(table(("given", "means"), ((f"`{old}`", f"`{new}`") for old, new in spellings)))
    fixed = ((dashes([name]), ", ".join(f"`{v}`" for v in only.texts), only.why) for name, only in FIXED.items())
    parts += ["Accepted with one meaning only:\n", table(("flag", "values", "why"), fixed)]
    parts.append(f"Accepted without effect, with a warning: {dashes(IGNORED)}.\n")
    return parts


# coverage ------------------------------------------------------------------------------------------------------------


def coverage_page() -> str:
    """See ``tools.coverage_page``."""
    from tools import coverage_page

    return coverage_page.page(NOTE, coverage_page.files())


def served_page() -> str:
    """See ``tools.served_page``."""
    from tools import served_page

    return served_page.page(NOTE, served_page.files())


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/hooks.md": hooks_page,
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/cli.md": cli_page,
    "docs/coverage/README.md": coverage_page,
    "docs/coverage/served.md": served_page,
}
"""Page -> what writes it."""


def stale(root: Path = ROOT) -> list[str]:
    """Pages whose file differs from what the code says."""

    def current(page: str) -> str:
        path = root / page
        return path.read_text(encoding="utf-8") if path.exists() else ""

    return [page for page, write in PAGES.items() if current(page) != write()]


def main() -> int:
    """Write every page, or with ``--check`` name those that differ and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        drift = stale()
        for page in drift:
            print(f"{page} is not what the code says; run: make docs", file=sys.stderr)
        return 1 if drift else 0
    for page in stale():
        (ROOT / page).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / page).write_text(PAGES[page](), encoding="utf-8")
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

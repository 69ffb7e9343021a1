"""The report as one HTML page that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from qiao.errors import ParameterError
from qiao.regress import svg
from qiao.regress.report import label, shown, tag_rows, with_interval, worst

LANGUAGES = ("en", "zh")


def texts_of(language: str) -> dict[str, str]:
    """The report's texts in ``en`` or ``zh``. Raises ``ParameterError``."""
    if language not in LANGUAGES:
        raise ParameterError("--lang", f"must be one of {', '.join(LANGUAGES)}, got {language!r}")
    path = files("qiao.regress").joinpath("messages").joinpath(f"{language}.json")
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def render(report: Mapping[str, Any], language: str) -> str:
    """The page; every text of models and suites is escaped."""
    say = texts_of(language)
    environment = Environment(
        loader=PackageLoader("qiao.regress"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html")
    return page.render(
        say=say,
        language={"en": "en", "zh": "zh-CN"}[language],
        report=report,
        rows=tag_rows(report),
        worst=worst(report),
        notes=[say[f"note.{note['key']}"].format(**note["values"]) for note in report["notes"]],
        models=[(say["base"], report["base"]), (say["candidate"], report["candidate"])],
        plots=[(title, Markup(plot)) for title, plot in _plots(report, say) if plot],  # noqa: S704 - made in svg.py
        label=label,
        with_interval=with_interval,
        heat=_heat,
    )


def _plots(report: Mapping[str, Any], say: Mapping[str, str]) -> list[tuple[str, str]]:
    tags = report["tags"]
    checked = [(t, f["base_passes"], f["candidate_passes"], f["checked"]) for t, f in tags.items() if f["checked"]]
    plots = [
        (say[f"plot.{name}"], _metric_plot(report, name, say[f"plot.{name}"], form))
        for name, form in (("kl", ".3g"), ("top1", ".1%"), ("changed", ".0%"))
    ]
    quantiles = [(share, value) for share, value in report["kl_quantiles"]]
    plots.insert(1, (say["plot.quantiles"], svg.curve(quantiles, say["plot.quantiles"])))
    plots.append((say["plot.checks"], svg.pairs(checked, say["plot.checks"]) if checked else ""))
    return plots


def _metric_plot(report: Mapping[str, Any], name: str, title: str, form: str) -> str:
    """Bars of one metric by tag, with its thresholds."""
    limits = {v["tag"]: v for v in report["verdicts"] if v["metric"] == name}
    rows = []
    for tag, found in report["tags"].items():
        figure, limit = found[name], limits.get(tag)
        if figure is not None:
            bad = limit is not None and not limit["holds"]
            line = None if limit is None else limit["limit"]
            text = shown(figure["value"], form)
            rows.append(svg.Bar(tag, float(figure["value"]), text, figure["low"], figure["high"], line, bad))
    return svg.bars(rows, title) if rows else ""


def _heat(value: float) -> int:
    """A class from 0 to 4 for the divergence of one token, in nats."""
    return sum(value > bound for bound in (0.01, 0.1, 0.5, 2.0))

"""Collects what a run of the kit found, from pytest's reports, as data."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from qiao.contract.cases import Case

from qiao_conformance.coverage import Tally
from qiao_conformance.target import Target

TAG = "qiao"
"""Name of the property that says what an item of the kit checks; it travels with reports."""


@dataclass
class Results:
    """``tallies`` by hook; ``failures`` with id, hook, message; ``partial`` where something was left out."""

    passed: int = 0
    skipped: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    partial: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def add(self, report: pytest.TestReport) -> None:
        """One phase of one item of the kit; others are passed over."""
        properties = dict(report.user_properties)
        tag = properties.get(TAG)
        if not isinstance(tag, dict):
            return
        self.seconds += report.duration
        if report.when == "call":
            self.measured += [value for name, value in report.user_properties if name == "qiao_measured"]
        if report.skipped:
            self.skipped += 1
        elif report.failed:
            self._failed(report, tag)
        elif report.when == "call":
            self.passed += 1
            self._tally(tag, str(tag["name"]), True)

    def _failed(self, report: pytest.TestReport, tag: Mapping[str, Any]) -> None:
        message = str(dict(report.user_properties).get("qiao_message") or report.longreprtext)
        self.failures.append({"check": tag["name"], "hook": ", ".join(tag["hooks"]), "message": message})
        self._tally(tag, tag["name"], False)

    def _tally(self, tag: Mapping[str, Any], name: str, passed: bool) -> None:
        for hook in tag["hooks"]:
            self.tallies.setdefault(hook, Tally()).add(name, tag["dtype"], passed, called=tag["called"])

    def as_dict(self, target: Target, level: str) -> dict[str, Any]:
        """The run as JSON-ready data."""
        device = target.device
        return {
            "schema": 1,
            "plugin": target.name,
            "distribution": target.distribution,
            "version": target.version,
            "device": {"name": device.name, "torch_device": device.torch_device, "chip": device.chip},
            "evidence": device.evidence,
            "sdk": dict(target.capabilities.sdk),
            "level": level,
            "ok": self.ok,
            "partial": self.partial,
            "passed": self.passed,
            "failed": len(self.failures),
            "skipped": self.skipped,
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
            "looser": [
                {"hook": hook, "dtype": dtype, "atol": t.atol, "rtol": t.rtol}
                for (hook, dtype), t in sorted(target.capabilities.tolerances.items())
            ],
            "performance": self.measured,
        }


def tag_of(item: pytest.Item, hooks: Container[str]) -> dict[str, Any]:
    """What ``item`` checks of a plugin with ``hooks``.

    Its name, the hooks, the dtype where there is one, and whether hooks are called.
    """
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case = parameters.get("case") or parameters.get("pair", (None,))[0]
    dtype = case.dtype if isinstance(case, Case) else parameters.get("dtype", "")
    named = case.hook if isinstance(case, Case) else parameters.get("hook") or parameters.get("drawn_hook")
    function = getattr(item, "originalname", item.name)
    concerned = (named, _ALONG.get(named, "")) if named else _CALLED_BY.get(function, ())
    found = [hook for hook in concerned if hook in hooks]
    return {"name": item.name, "hooks": found, "dtype": dtype, "called": function != "test_names_and_types"}


_ALONG = {"matmul": "pack_weight", "expert_matmul": "pack_weight", "attention": "prepare_attention"}
"""Hooks that are tried through another one."""

_CALLED_BY = {
    "test_out_of_memory": ("allocate_kv",),
    "test_threads": ("set_threads",),
    "test_packed_weights_come_back": ("restore_weight", "pack_weight"),
    "test_replays_follow_their_buffers": ("capture",),
    "test_capture_refuses_what_it_cannot_follow": ("capture",),
    "test_required_device_hooks": (
        *("probe_devices", "capabilities", "memory_info", "synchronize"),
        *("utilization", "collective_backend"),
    ),
}
"""Hooks that a check without parameters calls."""


def message_of(error: BaseException) -> str:
    """What ``error`` says, with the smallest case that hypothesis found where there is one."""
    notes = [note for note in getattr(error, "__notes__", ()) if "reproduce_failure" not in note]
    return "\n".join(
        [f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error), *notes]
    )

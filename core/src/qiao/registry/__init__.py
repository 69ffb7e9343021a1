"""All that touches pluggy: which plugins exist, which one is used, what runs where, and the table bound from that."""

from qiao.registry.backend import Backend, backend_of
from qiao.registry.binder import bind
from qiao.registry.discovery import Discovery, PluginRecord, allowed_plugins, discover
from qiao.registry.fallback import FallbackCounters, FallbackRecord, kernel_error
from qiao.registry.plan import DEFAULT_STEP, Plan, StepPrice, make_plan
from qiao.registry.policy import Policy, enforce, format_bytes, parse_bytes
from qiao.registry.pricing import Price, Rates
from qiao.registry.probe import confirm, probe_operators
from qiao.registry.selection import choose, planning_backend
from qiao.registry.survey import Surveyed, survey

__all__ = [
    "DEFAULT_STEP",
    "Backend",
    "Discovery",
    "FallbackCounters",
    "FallbackRecord",
    "Plan",
    "PluginRecord",
    "Policy",
    "Price",
    "Rates",
    "StepPrice",
    "Surveyed",
    "allowed_plugins",
    "backend_of",
    "bind",
    "choose",
    "confirm",
    "discover",
    "enforce",
    "format_bytes",
    "kernel_error",
    "make_plan",
    "parse_bytes",
    "planning_backend",
    "probe_operators",
    "survey",
]

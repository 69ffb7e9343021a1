"""All that touches pluggy: which plugins exist, which one is used, what runs where, and the table bound from that."""

from qiao.registry.backend import Backend, backend_of
from qiao.registry.binder import bind
from qiao.registry.discovery import Discovery, PluginRecord, allowed_plugins, discover
from qiao.registry.fallback import FallbackCounters, FallbackRecord
from qiao.registry.plan import Plan, StepPrice, make_plan
from qiao.registry.policy import Policy, enforce, to_dequantize
from qiao.registry.pricing import Price, Rates
from qiao.registry.probe import confirm
from qiao.registry.selection import choose, planning_backend
from qiao.registry.survey import Surveyed, survey

__all__ = [
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
    "make_plan",
    "planning_backend",
    "survey",
    "to_dequantize",
]

"""Whether a candidate still answers as its base: two models, plugins or devices on the user's own prompts."""

from qiao.regress.report import make_report
from qiao.regress.run import Comparison, Options, compare
from qiao.regress.suite import BUILT_IN, Case, Suite, load_suite, read_suite
from qiao.regress.thresholds import METRICS, Threshold, parse_thresholds, usable

__all__ = [
    "BUILT_IN",
    "METRICS",
    "Case",
    "Comparison",
    "Options",
    "Suite",
    "Threshold",
    "compare",
    "load_suite",
    "make_report",
    "parse_thresholds",
    "read_suite",
    "usable",
]

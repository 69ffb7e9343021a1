"""Metrics and logs: what an operator of a server sees."""

from qiao.observability.logs import configure_logging
from qiao.observability.metrics import FinishedRequest, Metrics

__all__ = ["FinishedRequest", "Metrics", "configure_logging"]

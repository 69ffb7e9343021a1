"""Metric families with the labels of one engine of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Values = float | Mapping[str, float]
"""One value, or one for each value of one more label."""


class HistogramTotals(Protocol):
    """Observations counted by bucket, and their sum. ``counts`` is empty before the first."""

    counts: list[int]
    sum: float


class Families:
    """Makes families whose samples have ``labels``; ``label`` is one more, which tells the values apart."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)

    def gauge(self, name: str, text: str, values: Values, label: str = "") -> Metric:
        """What may rise and fall."""
        family = GaugeMetricFamily(name, text, labels=self._keys(label))
        for key, value in _items(values):
            family.add_metric([*self.labels.values(), *key], value)
        return family

    def counter(self, name: str, text: str, values: Values, label: str = "") -> Metric:
        """What only rises; its samples end in ``_total``."""
        family = CounterMetricFamily(name, text, labels=self._keys(label))
        for key, value in _items(values):
            family.add_metric([*self.labels.values(), *key], value)
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[float], totals: HistogramTotals | None = None) -> Metric:
        """Observations by ``bounds``; empty without ``totals``."""
        counts = totals.counts if totals is not None and totals.counts else [0] * (len(bounds) + 1)
        names = [*map(floatToGoString, bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
        family = HistogramMetricFamily(name, text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), buckets, 0.0 if totals is None else totals.sum)
        return family

    def _keys(self, label: str) -> list[str]:
        return [*self.labels, label] if label else list(self.labels)


def _items(values: Values) -> list[tuple[tuple[str, ...], float]]:
    if isinstance(values, Mapping):
        return [((key,), value) for key, value in values.items()]
    return [((), values)]

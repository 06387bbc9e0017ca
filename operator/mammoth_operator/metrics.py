"""Do: own the operator's metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PREFIX = "mammoth_operator_"


class Metrics:
    """The operator rows of the metrics table, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(f"{PREFIX}reconcile_duration_seconds", "time of one reconcile", buckets=SECONDS, registry=self._registry)  # fmt: skip
        self.reconciles = Counter(f"{PREFIX}reconcile", "reconciles by how they ended", ["result"], registry=self._registry)  # fmt: skip
        self.errors = Counter(f"{PREFIX}reconcile_errors", "failed reconciles by type", ["type"], registry=self._registry)  # fmt: skip
        self.queue_depth = Gauge(f"{PREFIX}queue_depth", "keys that wait for their time", registry=self._registry)
        self.last_event = Gauge(f"{PREFIX}watch_last_event_timestamp_seconds", "last sign of life of a watch", ["kind"], registry=self._registry)  # fmt: skip
        self.resources = Gauge(f"{PREFIX}resources", "objects by phase", ["phase"], registry=self._registry)
        self.corrections = Counter(f"{PREFIX}drift_corrections", "objects restored after a change by others", registry=self._registry)  # fmt: skip
        self.api_seconds = Histogram(f"{PREFIX}api_request_seconds", "requests to the API server", ["verb", "code"], buckets=SECONDS, registry=self._registry)  # fmt: skip
        self.decisions = Counter("mammoth_tuning_decisions", "comparisons of the tuner by what came of them", ["action"], registry=self._registry)  # fmt: skip
        self.promises = Counter("mammoth_slo_requests", "pictures by SLO class and whether its promise was kept", ["namespace", "name", "class", "result"], registry=self._registry)  # fmt: skip

    def timed(self, verb: str, code: str, elapsed_s: float) -> None:
        """Count one request to the API server."""
        self.api_seconds.labels(verb, code).observe(elapsed_s)

    def text(self, phases: Iterable[str], *, depth: int) -> bytes:
        """Return all of it in Prometheus' text format; `phases` has an entry for each object, `depth` is the queue's."""
        self.queue_depth.set(depth)
        self.resources.clear()
        for phase in phases:
            self.resources.labels(phase or "Pending").inc()
        return generate_latest(self._registry)

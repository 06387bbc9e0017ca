"""Do: log lines as JSON with the request's id, and the Prometheus metrics of a stage on a port of their own.

Prompts never reach a log line or a label. Names and units: docs/architecture.md, "Metrics".
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from pythonjsonlogger.json import JsonFormatter

__all__ = ["Metrics", "configure_logging", "request_context", "serve_metrics", "shape_class"]

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
SHAPE_CLASSES_PX = (256, 512, 768, 1024, 1536, 2048)

_request: ContextVar[Mapping[str, str] | None] = ContextVar("mammoth_request", default=None)


def configure_logging(level: str, stage: str) -> None:
    """Write every log record as one JSON object on stderr, with the stage and the request that it belongs to."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter(
        "{asctime}{levelname}{name}{message}",
        style="{",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        static_fields={"stage": stage},
    )
    handler.setFormatter(formatter)
    handler.addFilter(_add_request)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextmanager
def request_context(request_id: str, labels: Mapping[str, str] | None = None) -> Iterator[None]:
    """Mark log records inside the block with `request_id` and the caller's labels."""
    token = _request.set({"request_id": request_id, **{f"label_{key}": text for key, text in (labels or {}).items()}})
    try:
        yield
    finally:
        _request.reset(token)


def _add_request(record: logging.LogRecord) -> bool:
    for key, value in (_request.get() or {}).items():
        setattr(record, key, value)
    return True


def shape_class(height: int, width: int) -> str:
    """Return the smallest square class that holds the picture, as a metric label of bounded cardinality."""
    pixels = height * width
    return next((f"{side}px" for side in SHAPE_CLASSES_PX if pixels <= side * side), f"over{SHAPE_CLASSES_PX[-1]}px")


class Metrics:
    """The collectors of one stage, in a registry of their own. Their owners count; nobody reads them back.

    Every series carries the stage; those that vary further are called with the value of their own label.
    """

    def __init__(self, stage: str) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("stage",), registry=registry).labels(stage)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("stage",), registry=registry).labels(stage)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ("stage",), registry=registry, buckets=buckets).labels(stage)

        def counters(name: str, text: str, label: str) -> Callable[[str], Counter]:
            return partial(Counter(name, text, ("stage", label), registry=registry).labels, stage)

        def histograms(name: str, text: str, label: str) -> Callable[[str], Histogram]:
            return partial(Histogram(name, text, ("stage", label), registry=registry, buckets=SECONDS).labels, stage)

        self.requests = counters("mammoth_requests", "Requests that ended, by status code", "code")
        self.requests_in_flight = gauge("mammoth_requests_in_flight", "Requests that are being served")
        self.request_duration = histograms("mammoth_request_duration_seconds", "From arrival to end", "shape_class")
        self.eta_error = histogram(
            "mammoth_eta_error_seconds", "From the time that was estimated at admission to the end, either way", SECONDS
        )
        self.stage_duration = histograms(
            "mammoth_stage_duration_seconds", "A picture's time on the device", "shape_class"
        )
        self.queue_depth = gauge("mammoth_queue_depth", "Requests that wait for the device")
        self.queue_wait = histogram("mammoth_queue_wait_seconds", "From queued to running", SECONDS)
        self.batch_size = histogram("mammoth_batch_size", "Jobs or rows that ran together", BATCH_SIZES)
        self.rejected = counters("mammoth_batch_rejected", "Requests refused at admission", "reason")
        self.cancelled = counter("mammoth_cancelled", "Requests whose caller left")
        self.limit = partial(
            Gauge("mammoth_limit", "Live limits in force", ("stage", "knob"), registry=registry).labels, stage
        )
        self.units = partial(
            Gauge(
                "mammoth_dit_units",
                "Shapes of several rows that stepped, by whether a row's bits are those it has alone",
                ("stage", "exact"),
                registry=registry,
            ).labels,
            stage,
        )
        self.tuning_epoch = gauge("mammoth_tuning_epoch", "Epoch of the limits in force")
        self.conditioning_bytes = counter("mammoth_conditioning_bytes", "Conditioning rows that crossed")
        self.conditioning_transfer = histogram(
            "mammoth_conditioning_transfer_seconds",
            "From the last token to the last row's acknowledgement",
            SHORT_SECONDS,
        )
        self.conditioning_resends = counter("mammoth_conditioning_resends", "Streams opened again to replay rows")
        self.tokens = counter("mammoth_ar_tokens", "Grid tokens decoded")
        self.token_seconds = histogram("mammoth_ar_token_seconds", "Time between a picture's tokens", SHORT_SECONDS)
        self.steps = counter("mammoth_dit_steps", "Denoising steps of single pictures")
        self.step_seconds = histogram("mammoth_dit_step_seconds", "Time between a picture's steps", SHORT_SECONDS)
        self.images = counters("mammoth_images", "Pictures delivered", "shape_class")
        self.image_pixels = counter("mammoth_image_pixels", "Pixels delivered")


def serve_metrics(metrics: Metrics, host: str, port: int) -> WSGIServer:
    """Serve `metrics` over HTTP from a thread and return the server, whose `server_port` is the bound one."""
    server, _ = start_http_server(port, addr=host, registry=metrics.registry)
    return server

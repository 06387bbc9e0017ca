"""Logs are JSON with the request's id; metrics have the documented names and bounded labels."""

from __future__ import annotations

import json
import logging

import pytest
from prometheus_client import generate_latest

from mammoth_serving.telemetry import Metrics, configure_logging, request_context, shape_class


@pytest.fixture
def restored_logging():
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_a_log_line_is_json_with_stage_request_and_labels(restored_logging, capsys):
    configure_logging("info", "ar")
    with request_context("r-1", {"team": "blue"}):
        logging.getLogger("x").info("hello", extra={"tokens": 3})
    logging.getLogger("x").info("outside")
    inside, outside = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (inside["stage"], inside["request_id"], inside["label_team"], inside["tokens"]) == ("ar", "r-1", "blue", 3)
    assert (inside["message"], inside["level"]) == ("hello", "INFO")
    assert "request_id" not in outside


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (16, 16, "256px"),
        (256, 256, "256px"),
        (272, 256, "512px"),
        (1024, 1024, "1024px"),
        (1536, 1024, "1536px"),
        (2048, 2048, "2048px"),
        (4096, 4096, "over2048px"),
    ],
)
def test_sizes_fall_into_a_few_classes(height, width, expected):
    assert shape_class(height, width) == expected


def test_metrics_carry_their_documented_names_and_the_stage():
    metrics = Metrics("dit")
    metrics.requests("OK").inc()
    metrics.images("512px").inc()
    metrics.request_duration("512px").observe(3)
    text = generate_latest(metrics.registry).decode()
    assert 'mammoth_requests_total{code="OK",stage="dit"} 1.0' in text
    assert 'mammoth_images_total{shape_class="512px",stage="dit"} 1.0' in text
    assert 'mammoth_request_duration_seconds_bucket{le="600.0",shape_class="512px",stage="dit"} 1.0' in text
    assert 'mammoth_queue_depth{stage="dit"} 0.0' in text

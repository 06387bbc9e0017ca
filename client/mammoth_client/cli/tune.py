"""Translate: `mammoth tune explain` to what the operator's tuner did to a deployment, and why, from its status alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from mammoth_client.cli.deploy import where
from mammoth_client.kube import Deployments

__all__ = ["explanation", "tune"]

OUTCOMES = {
    "pending": "not judged yet",
    "kept": "kept",
    "reverted": "taken back",
    "revert": "takes the last change back",
    "recommended": "recommended, not put in force",
}


@click.group()
def tune() -> None:
    """Look at what the tuner does."""


@tune.command()
@where
def explain(*, name: str, namespace: str, context: str | None) -> None:
    """Say what the tuner did to NAME, and why."""
    found = Deployments(context).get(namespace, name)
    click.echo("\n".join(explanation(found.get("status", {}))))


def explanation(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines: what is in force, whether the tuner may act, the capacity, the last decisions, newest first."""
    tuning = status.get("tuning", {})
    applied = tuning.get("applied", {})
    yield f"mode {tuning.get('mode', 'unknown')}, epoch {tuning.get('epoch', 0)}, confirmed by {tuning.get('acked', '0/0')} pods"
    if applied:
        yield f"in force: {_caps(applied)}"
    if recommended := tuning.get("recommended"):
        yield f"recommended: {_caps(recommended)}"
    for item in status.get("conditions", ()):
        if item["type"] == "TuningActive":
            yield f"now: {item['reason']}: {item['message']}"
    if capacity := status.get("capacity"):
        classes = "".join(f", p95 of {each['name']} {each['seconds']:g} s" for each in capacity.get("p95Seconds", ()))
        yield f"capacity: {capacity['imagesPerHour']:g} images an hour{classes} ({capacity['gpu']}, measured {capacity['profileTime']})"
    for line in status.get("capacity", {}).get("waves", ()):
        yield f"a step at {line['size']}: {line['fixedMs']:g} ms and {line['pictureMs']:g} ms a picture, within {line['missPercent']:g} %"
    if scaling := status.get("scaling"):
        yield f"replicas: AR {scaling['ar']}, DiT {scaling['dit']} ({scaling['reason']}: {scaling['message']})"
    history = tuning.get("history", ())
    yield f"{len(history)} decisions, newest first:" if history else "no decision yet"
    for record in reversed(history):
        yield from _record(record)


def _caps(caps: Mapping[str, Any]) -> str:
    return f"AR {caps['arMaxNumSeqs']} rows, DiT {caps['ditMaxNumSeqs']} at once, wait {caps['requestBatchMaxWaitMs']:g} ms"


def _record(record: Mapping[str, Any]) -> Iterator[str]:
    after = f", {record['p95After']:g} s after" if "p95After" in record else ""
    yield f"{record['time']} {record['knob']} {record['from']:g} to {record['to']:g}: {record['reason']}, {OUTCOMES.get(record.get('outcome', ''), '')}"
    yield f"    p95 {record.get('p95Before', 0):g} s before, {record.get('p95Expected', 0):g} s expected{after}"
    yield f"    {record['evidence']}"

"""Decide: what is wrong with a pod, in one typed word and one sentence that helps at three in the morning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mammoth_operator.names import DRAINING_ANNOTATION, POOL_LABEL, REVISION_LABEL

__all__ = ["Failure", "PodFacts", "Problem", "pod_facts", "why_refused"]

IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError"}  # fmt: skip
CONFIG_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
DOWNLOADER = "download"
OBSTACLES = {
    "capacity": ("insufficient", "cannot allocate"),
    "taint": ("taint",),
    "node selection": ("affinity", "selector"),
    "volume": ("volume", "persistentvolumeclaim"),
}
MAX_TEXT = 300
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a pod is not ready: Unschedulable, ImagePullFailed, OutOfMemory, PodsCrashing, GpuFault, DownloadFailed,
    ProbeFailing or Loading."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The last time a container of the pod ended badly."""

    time: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What decisions need of a pod."""

    pool: str
    revision: str
    ip: str
    ready: bool
    finished: bool  # Succeeded or Failed: it holds no device
    node: str
    draining_since: str
    problem: Problem | None
    failure: Failure | None
    ready_since: str = ""


def pod_facts(raw: Raw) -> PodFacts:
    """Return the facts of a pod."""
    meta, status = raw["metadata"], raw.get("status") or {}
    labels = meta.get("labels", {})
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions", ()))
    return PodFacts(
        pool=labels.get(POOL_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        ip=status.get("podIP") or "",
        ready=ready,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        node=raw.get("spec", {}).get("nodeName") or "",
        draining_since=meta.get("annotations", {}).get(DRAINING_ANNOTATION, ""),
        problem=None if ready else _problem(status),
        failure=_failure(status),
        ready_since=next(
            (
                item.get("lastTransitionTime") or ""
                for item in status.get("conditions", ())
                if item["type"] == "Ready" and ready
            ),
            "",
        ),
    )


def _problem(status: Raw) -> Problem | None:
    if status.get("phase") == "Failed" and not status.get("containerStatuses"):
        reason = "GpuFault" if status.get("reason") == "UnexpectedAdmissionError" else "PodsCrashing"
        return Problem(reason, _short(f"{status.get('reason', 'Failed')}: {status.get('message', '')}"))
    for item in status.get("conditions", ()):
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return Problem("Unschedulable", _short(why_unscheduled(item.get("message", ""))))
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        problem = _container_problem(container)
        if problem:
            return problem
    return Problem("Loading", "the containers are being made" if status.get("phase") != "Running" else "the model is loading")  # fmt: skip


def _container_problem(container: Raw) -> Problem | None:
    state, last = container.get("state", {}), container.get("lastState", {})
    waiting, ended = state.get("waiting"), state.get("terminated") or last.get("terminated")
    if waiting and waiting.get("reason") in IMAGE_REASONS:
        return Problem("ImagePullFailed", _short(f"{waiting['reason']}: {waiting.get('message', container.get('image', ''))}"))  # fmt: skip
    if waiting and waiting.get("reason") in CONFIG_REASONS:
        return Problem("PodsCrashing", _short(f"{waiting['reason']}: {waiting.get('message', '')}"))
    if ended and ended.get("exitCode", 0) != 0 and "running" not in state:
        reason = "DownloadFailed" if container.get("name") == DOWNLOADER else "PodsCrashing"
        return Problem("OutOfMemory" if ended.get("reason") == "OOMKilled" else reason, _ended_text(ended))
    if "running" in state and container.get("started") and not container.get("ready"):
        return Problem("ProbeFailing", "the process runs and reports that it does not serve")
    return None


def _failure(status: Raw) -> Failure | None:
    ends = [
        ended
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        for ended in (container.get("state", {}).get("terminated"), container.get("lastState", {}).get("terminated"))
        if ended and ended.get("exitCode", 0) != 0
    ]
    if not ends:
        return None
    ended = max(ends, key=lambda item: item.get("finishedAt") or "")
    return Failure(ended.get("finishedAt") or "", ended.get("reason") or "Error", _ended_text(ended))


def _ended_text(ended: Raw) -> str:
    said = ended.get("message", "").strip()
    return _short(f"exit code {ended.get('exitCode')}" + (f": {said}" if said else ""))


def why_unscheduled(message: str) -> str:
    """Return the scheduler's sentence after the words that say what kinds of obstacles it names."""
    low = message.lower()
    kinds = [kind for kind, words in OBSTACLES.items() if any(word in low for word in words)]
    return f"{', '.join(kinds) or 'scheduling'}: {message}"


def why_refused(message: str) -> Problem:
    """Return why the API server would not let a pod be made."""
    kind = "QuotaExceeded" if "quota" in message.lower() else "PodsRefused"
    return Problem(kind, _short(("quota: " if kind == "QuotaExceeded" else "") + message))


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"

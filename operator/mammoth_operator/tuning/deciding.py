"""Decide everything that measurements decide about one deployment: caps, replicas, capacity, and what status says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mammoth_operator.limits import Caps
from mammoth_operator.names import Pool
from mammoth_operator.observed import Child
from mammoth_operator.reports import Load
from mammoth_operator.situation import hash_of
from mammoth_operator.spec import PipelineSpec
from mammoth_operator.tuning.capacity import basis_of, capacity_of
from mammoth_operator.tuning.profile import Profiled
from mammoth_operator.tuning.samples import Observed
from mammoth_operator.tuning.sizing import sized
from mammoth_operator.tuning.slo import burning
from mammoth_operator.tuning.standing import Standing
from mammoth_operator.tuning.twin import Plant, Setting
from mammoth_operator.tuning.verdict import Verdict, goal_of, reach, under, verdict

__all__ = ["Ground", "Tuned", "reverted", "tuned"]

START_S = 120.0  # where no pod says what it took
REVERT_TOLD = timedelta(hours=1)
Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ground:
    """What stands: the spec, its caps within what memory allows, the pods that take work and what they said, what moves."""

    spec: PipelineSpec
    asked: Caps
    within: Caps
    target: str
    ready: Sequence[Child]
    loads: Mapping[str, Load]
    want: Mapping[Pool, int]
    rolling: str
    profiled: Profiled
    observed: Observed


@dataclass(frozen=True, slots=True)
class Tuned:
    """The verdict on the caps, what `status.capacity` and `status.scaling` are, which promise burns, which change was taken back.

    The last two are sentences, empty when nothing is wrong.
    """

    verdict: Verdict
    capacity: Status
    scaling: Status
    burning: str = ""
    reverted: str = ""


def tuned(ground: Ground, previous: Mapping[str, Any], now: datetime) -> Tuned:
    """Return what to do and to say now; `previous` is the whole status."""
    spec, known = ground.spec, previous.get("tuning", {})
    epoch = known.get("epoch", 0)
    setting = Setting(ar_replicas=max(ground.want["ar"], 1), dit_replicas=max(ground.want["dit"], 1))
    plant = Plant(spec.ar.capacity.max_num_seqs, start_s(ground.ready))
    there = reach(
        spec.tuning,
        Caps(spec.ar.capacity.max_num_seqs, spec.dit.capacity.max_num_seqs, 0.0),
        ground.within,
        ground.asked,
    )
    standing = Standing(
        tuning=spec.tuning,
        profiled=ground.profiled,
        observed=ground.observed,
        num_ready=len(ground.ready),
        silent=[pod.name for pod in ground.ready if pod.uid not in ground.loads],
        old=[pod.name for pod in ground.ready if hash_of(pod) != ground.target],
        unacked=[pod.name for pod in ground.ready if pod.uid in ground.loads and ground.loads[pod.uid].epoch != epoch],
        rolling=ground.rolling,
        paused=spec.paused,
        batching=spec.dit.batching,
        bounds=there.problem,
    )
    words = verdict(standing, known, ground.within, there, setting, plant, now)
    setting = under(setting, words.caps)
    # one comparison a look: replicas are weighed in the next look when the caps were in this one
    held = words.weighed or bool(ground.rolling) or spec.paused or bool(standing.silent) or bool(standing.old)
    scaling = sized(spec, previous.get("scaling", {}), ground.observed, ground.profiled.profile, setting, goal_of(spec.tuning), plant, now, hold=held)  # fmt: skip
    return Tuned(
        words,
        _capacity(ground, previous.get("capacity", {}), setting, plant),
        scaling,
        burning(ground.observed.samples, goal_of(spec.tuning).promises, now.timestamp()),
        reverted(words.status, now),
    )


def reverted(tuning: Mapping[str, Any], now: datetime) -> str:
    """Say which change has just been taken back; empty once the pictures since have shown that this helped."""
    last = tuning.get("lastDecision", {})
    if last.get("outcome") != "revert" or now - datetime.fromisoformat(last["time"]) > REVERT_TOLD:
        return ""
    return f"{last['knob']} is back at {last['to']:g}: {last['evidence']}"


def start_s(pods: Sequence[Child]) -> float:
    """Return what a pod takes from its creation until it serves, as the quickest of `pods` shows it."""
    took = [
        (datetime.fromisoformat(pod.pod.ready_since) - datetime.fromisoformat(pod.created)).total_seconds()
        for pod in pods
        if pod.pod and pod.pod.ready_since and pod.created
    ]
    return max(min(took), 1.0) if took else START_S


def _capacity(ground: Ground, previous: Mapping[str, Any], setting: Setting, plant: Plant) -> Status:
    """Return `status.capacity`, computed anew when what it rests on has changed."""
    profile = ground.profiled.profile
    sizes = [load.default_size for load in ground.loads.values() if load.default_size]
    if profile is None or not sizes:
        return dict(previous)
    promises = goal_of(ground.spec.tuning).promises
    if previous.get("basis") == basis_of(profile, sizes[0], promises, setting):
        return dict(previous)
    return capacity_of(profile, sizes[0], promises, setting, plant)

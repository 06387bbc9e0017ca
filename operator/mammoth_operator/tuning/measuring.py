"""Do: own the boot profiles: one run of measurements for each pair of hardware and versions, kept in a ConfigMap."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from mammoth_operator.conditions import stamp
from mammoth_operator.names import Key, Pool
from mammoth_operator.observed import Child
from mammoth_operator.reports import Load
from mammoth_operator.tuning.probing import Point, Probe, next_probe, probed, sizes_to_measure
from mammoth_operator.tuning.profile import Profile, Profiled, ProfileError, Size
from mammoth_wire.errors import MammothError

__all__ = ["Profiler", "profile_key"]

AGAIN_S, HOPELESS_S = 30.0, 600.0  # until it is tried again: pods that were away, measurements that made no profile
MAX_KEPT = 8  # profiles in a ConfigMap

logger = logging.getLogger(__name__)


class Measures(Protocol):
    """The part of Control that measures."""

    async def profile(self, pod: Child, probe: Probe) -> Point: ...


def profile_key(ar: Load, dit: Load) -> tuple[str, str]:
    """Return (hardware, versions) of a pair of pods, under which its profile is kept."""
    return f"AR {ar.hardware}; DiT {dit.hardware}", f"AR {ar.versions}; DiT {dit.versions}; capacity {ar.capacity}, {dit.capacity}"  # fmt: skip


class Profiler:
    """Measures in the background. `spawn` runs a measurement, `wake` asks for another reconcile when it is done."""

    def __init__(
        self, control: Measures, *, spawn: Callable[[Coroutine[Any, Any, None]], object], wake: Callable[[Key], None]
    ) -> None:
        self._control, self._spawn, self._wake = control, spawn, wake
        self._made: dict[tuple[str, str], Profile] = {}
        self._failed: dict[tuple[str, str], tuple[float, str]] = {}
        self._running: set[tuple[str, str]] = set()

    def of(
        self,
        key: Key,
        pair: tuple[Child, Child] | None,
        loads: Mapping[str, Load],
        stored: Mapping[str, str],
        wanted: Iterable[Size],
    ) -> Profiled:
        """Return the profile of a pair of pods: a stored one, one measured before, or none while it is being measured."""
        if pair is None or any(pod.uid not in loads for pod in pair):
            return Profiled(data=stored)
        ar, dit = (loads[pod.uid] for pod in pair)
        name = profile_key(ar, dit)
        if dit.default_size is None or not ar.hardware:
            return Profiled(None, "ProfileMissing", "the pods do not say what they run on", stored)
        profile, problem = self._made.get(name), ""
        if profile is None:
            profile, problem = _stored(stored, name, dit.rows_alone)
        if profile is not None:
            return Profiled(profile, "", "", _kept(stored, profile))
        failed_s, why = self._failed.get(name, (-AGAIN_S, ""))
        if name not in self._running and time.monotonic() - failed_s >= AGAIN_S:
            self._running.add(name)
            self._spawn(self._measure(key, name, pair, (ar, dit), sizes_to_measure(dit.default_size, wanted)))
        if problem:
            return Profiled(None, "ProfileInvalid", problem, stored)
        return Profiled(None, "Profiling", why or f"{name[0]} is being measured", stored)

    async def _measure(
        self, key: Key, name: tuple[str, str], pair: tuple[Child, Child], loads: tuple[Load, Load], sizes: list[Size]
    ) -> None:
        pods: dict[Pool, Child] = {"ar": pair[0], "dit": pair[1]}
        points: dict[Probe, Point] = {}
        try:
            while (probe := next_probe(points, sizes, loads[1].capacity, loads[0].capacity)) is not None:
                points[probe] = await self._control.profile(pods[probe.pool], probe)
            self._made[name] = probed(points, *name, rows_alone=loads[1].rows_alone, time=stamp(datetime.now(UTC)))
            self._failed.pop(name, None)
            logger.info("profiled", extra={"key": str(key), "hardware": name[0], "num_measurements": len(points)})
        except (MammothError, ProfileError) as err:
            rest_s = HOPELESS_S - AGAIN_S if isinstance(err, ProfileError) else 0.0
            self._failed[name] = (time.monotonic() + rest_s, f"measuring {name[0]} failed: {err}")
            logger.warning("profiling failed", extra={"key": str(key), "hardware": name[0], "error": str(err)})
        finally:
            self._running.discard(name)
            self._wake(key)


def _stored(stored: Mapping[str, str], name: tuple[str, str], rows_alone: bool) -> tuple[Profile | None, str]:
    """Return the stored profile of this hardware and these versions, and what is wrong with it if it cannot be read."""
    for entry in stored.values():
        try:
            raw = json.loads(entry)
            if (raw.get("hardware"), raw.get("versions"), raw.get("rowsAlone", False)) != (*name, rows_alone):
                continue
            return Profile.parse(raw), ""
        except (ProfileError, ValueError, AttributeError) as err:
            return None, f"the stored profile of {name[0]} cannot be used: {err}"
    return None, ""


def _kept(stored: Mapping[str, str], profile: Profile) -> dict[str, str]:
    """Return the stored profiles with this one last, the oldest left out."""
    others = {key: text for key, text in stored.items() if key != profile.key}
    kept = dict(list(others.items())[-(MAX_KEPT - 1) :])
    text = json.dumps(profile.data(), separators=(",", ":"))
    return {**kept, profile.key: stored[profile.key] if _same(stored.get(profile.key, ""), profile) else text}


def _same(text: str, profile: Profile) -> bool:
    try:
        return Profile.parse(text) == profile
    except ProfileError:
        return False

"""Do: own what the pods have told of their pictures: the latest of each deployment, on one clock. It only saves asking again.

Pods tell lengths of time, never times of day, so their clocks need not agree: what ended `asked_ago_s` ago is placed by
our own clock. A pod that restarted counts from zero under another name; what it told before stays.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mammoth_operator.names import Key
from mammoth_operator.observed import Child
from mammoth_operator.reports import Load
from mammoth_operator.tuning.samples import Ask, Observed, Sample
from mammoth_wire.v1.control_pb2 import Served

__all__ = ["Observer", "OnPicture", "sample_of"]

MAX_KEPT = 1200
SLACK_S = 1.0  # a pod's own lengths may disagree by so much

OnPicture = Callable[[Key, Sample], None]


@dataclass(slots=True)
class _Memory:
    kept: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    told: dict[str, tuple[str, int]] = field(default_factory=dict)  # pod uid to its instance and newest sequence number
    num_told: int = 0
    num_lost: int = 0
    num_weighed: int = 0
    weighed_s: float = 0.0


class Observer:
    """Collects by deployment. `on_picture` hears of each picture once."""

    def __init__(self, on_picture: OnPicture = lambda key, sample: None) -> None:
        self._memories: dict[Key, _Memory] = {}
        self._on_picture = on_picture

    def after(self, key: Key) -> dict[str, int]:
        """Return, by pod uid, the sequence number after which its pictures are new."""
        memory = self._memories.get(key)
        return {} if memory is None else {uid: number for uid, (_, number) in memory.told.items()}

    def take(self, key: Key, pods: Iterable[Child], loads: Mapping[str, Load], now_s: float) -> Observed:
        """Take in what pods told just now and return everything known."""
        memory = self._memories.setdefault(key, _Memory())
        fresh, unusable = [], ""
        for pod in pods:
            load = loads.get(pod.uid)
            if load is None or not load.instance:
                continue
            instance, newest = memory.told.get(pod.uid, (load.instance, 0))
            newest = newest if instance == load.instance else 0
            pictures = [picture for picture in load.served if picture.sequence > newest]
            if pictures and newest:
                memory.num_lost += pictures[0].sequence - newest - 1
            memory.told[pod.uid] = (load.instance, max(newest, load.served_total))
            for picture in pictures:
                if _is_sound(picture):
                    fresh.append(sample_of(picture, now_s))
                else:
                    unusable = f"{pod.name} tells of a picture that took {picture.total_s:.3g} s and was asked for {picture.asked_ago_s:.3g} s ago"  # fmt: skip
        for sample in sorted(fresh, key=lambda sample: sample.done_s):
            memory.kept.append(sample)
            self._on_picture(key, sample)
        memory.num_told += len(fresh)
        living = {pod.uid for pod in pods}
        memory.told = {uid: told for uid, told in memory.told.items() if uid in living}
        return Observed(
            tuple(memory.kept), memory.num_told, memory.num_lost, unusable, memory.weighed_s,
            memory.num_told - memory.num_weighed,
        )  # fmt: skip

    def weighed(self, key: Key, now_s: float) -> None:
        """Note that settings were compared now."""
        memory = self._memories[key]
        memory.weighed_s, memory.num_weighed = now_s, memory.num_told

    def forget(self, key: Key) -> None:
        """Drop a deployment that is gone."""
        self._memories.pop(key, None)


def sample_of(picture: Served, now_s: float) -> Sample:
    """Return a told picture on our clock, `now_s` being when it was told."""
    ask = Ask(
        at_s=now_s - picture.asked_ago_s,
        height_px=picture.height,
        width_px=picture.width,
        steps=picture.steps,
        rows=max(picture.rows, 1),
        prompt_tokens=max(picture.prompt_tokens, 1),
        tokens=picture.grid_tokens,
    )
    joined_s = ask.at_s + picture.ar_queue_s
    ready_s = joined_s + picture.ar_s + picture.handover_s
    return Sample(
        ask, joined_s, ready_s, ready_s + picture.dit_queue_s, ask.at_s + picture.total_s,
        wave_size=picture.batch_size, denoise_s=picture.denoise_s, decode_s=picture.decode_s, failed=picture.failed,
    )  # fmt: skip


def _is_sound(picture: Served) -> bool:
    lengths = (
        picture.asked_ago_s, picture.ar_queue_s, picture.ar_s, picture.handover_s, picture.dit_queue_s, picture.denoise_s,
        picture.decode_s, picture.total_s,
    )  # fmt: skip
    positive = picture.height > 0 and picture.width > 0 and picture.steps > 0
    parts = sum(lengths[1:5])
    return (
        positive
        and all(math.isfinite(length) and length >= 0 for length in lengths)
        and picture.total_s <= picture.asked_ago_s + SLACK_S
        and parts <= picture.total_s + SLACK_S
    )

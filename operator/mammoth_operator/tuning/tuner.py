"""Decide one change of the live caps, or that nothing is to change, with the evidence for it.

The past pictures are drawn again on paper (`twin`) under every setting that is one change away, with costs that were
measured. A change is judged by the pictures that followed it, against what the old setting would have made of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from mammoth_operator.tuning.calibration import Calibrated, calibrated
from mammoth_operator.tuning.objective import Goal, Score, score
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.records import MAX_RECORDS, Knob, Record
from mammoth_operator.tuning.samples import Sample, percentile
from mammoth_operator.tuning.trial import Asked, Written
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["Answer", "Guard", "Limits", "Measured", "is_due", "moved", "tune"]

WAITS_MS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0)
MIN_GAIN = 0.03  # predictions that differ by less are the same
MIN_GAIN_BACK = 0.10  # what it takes to turn a knob back soon after
BACK_S = 600.0
MEMORY_S = 3600.0  # what did not help is not tried again for so long
MAX_PICTURES = 160  # that a prediction draws again
MAX_SEEN = 960  # that a change must not make worse, while the load stays as it is
MAX_MIX_MOVED, MAX_RATE_MOVED = 0.25, 1.25  # sizes by share, pictures by rate: beyond, it is another load
IDLE_WAIT_S = 0.05
UNEXPLAINED = 1.25  # p95 seen / p95 that the twin can explain
WEIGH_S = 30.0
COOLING = "the next change is possible {:g} s after the last"
MAX_BIAS = 2.0
AR_STEP = 0.25  # share of the AR cap that one change moves it by


@dataclass(frozen=True, slots=True)
class Guard:
    """When a change may be made, and when it is taken back."""

    min_samples: int = 30
    cooldown_s: float = 120.0
    max_regression: float = 0.10


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the knobs may stand: inclusive, within capacity, bounds and what memory has taught. Raises ValueError when nowhere."""

    dit: tuple[int, int] = (1, 8)
    wait_ms: tuple[float, float] = (0.0, 10_000.0)
    ar: tuple[int, int] = (1, 32)

    def __post_init__(self) -> None:
        for name, (low, high) in (("ditMaxNumSeqs", self.dit), ("requestBatchMaxWaitMs", self.wait_ms), ("arMaxNumSeqs", self.ar)):  # fmt: skip
            if low > high:
                raise ValueError(f"{name}: no value from {low:g} to {high:g} is allowed")


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen: pictures that ended, on one clock, oldest first, and `now_s` on it."""

    now_s: float
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do: `record` is the change to make, None to hold. `history` is what is remembered from now on.

    `reason` and `message` say why, in a word and a sentence; `judged` is the change whose outcome is now known; `doubt` says
    how the profile disagrees with what was seen.
    """

    reason: str
    message: str
    history: tuple[Record, ...]
    record: Record | None = None
    judged: Record | None = None
    doubt: str = ""
    now: Score | None = None

    @property
    def weighed(self) -> bool:
        """Return whether settings were compared."""
        return self.now is not None


@dataclass(frozen=True, slots=True)
class _Option:
    knob: Knob
    value: float
    score: Score
    gain: float  # over staying


def is_due(now_s: float, weighed_s: float, num_new: int, guard: Guard) -> bool:
    """Return whether it is worth asking again: enough pictures ended since `weighed_s`, when it was last asked."""
    return now_s - weighed_s >= WEIGH_S and num_new >= guard.min_samples


def tune(
    measured: Measured,
    setting: Setting,
    limits: Limits,
    profile: Profile,
    history: Sequence[Record] = (),
    *,
    goal: Goal = Goal(),
    guard: Guard = Guard(),
    plant: Plant = Plant(),
) -> Answer:
    """Return the next change, or why there is none. `setting` is in force in every pod since the last record's time."""
    history = tuple(history)[-MAX_RECORDS:]
    last = next((record for record in reversed(history) if record.outcome != "recommended"), None)
    fresh = [sample for sample in measured.samples if not sample.failed and _after(sample, last)]
    since_s = measured.now_s - last.time_s if last else math.inf
    is_early = since_s < guard.cooldown_s
    if is_early and (len(fresh) < guard.min_samples or last is None or last.outcome != "pending"):
        return Answer("Cooldown", COOLING.format(guard.cooldown_s), history)
    if len(fresh) < guard.min_samples:
        said = f"{len(fresh)} of {guard.min_samples} pictures since {'the last change' if last else 'the beginning'}"
        return Answer("NotEnoughData", said, history)
    window = fresh[-MAX_PICTURES:]
    ended = [sample for sample in measured.samples if not sample.failed]
    costs = calibrated(profile, ended[-2 * MAX_PICTURES :])
    seen = score(window, goal)
    judged, judged_history = _judge(last, window, seen, setting, costs, history, goal, guard, plant)
    if judged and judged.outcome == "reverted":
        return _revert(judged, seen, measured.now_s, judged_history, costs)
    if is_early:  # what makes things worse is taken back at once; praise has time
        return Answer("Cooldown", COOLING.format(guard.cooldown_s), history, doubt=costs.doubt, now=seen)
    history = judged_history
    best, now, told = _search(ended[-MAX_SEEN:], setting, limits, costs, history, measured.now_s, goal, plant)
    if best is None:
        return Answer("Settled", told, history, judged=judged, doubt=costs.doubt, now=seen)
    old = _value(setting, best.knob)
    bias = min(max(seen.p95_s / now.p95_s, 1 / MAX_BIAS), MAX_BIAS)
    record = Record(
        measured.now_s,
        best.knob,
        old,
        best.value,
        _why(best, old, now, goal),
        told,
        seen.p95_s,
        bias * best.score.p95_s,
    )
    return Answer(
        "Tuned", _sentence(record), (*history, record)[-MAX_RECORDS:], record, judged, doubt=costs.doubt, now=seen
    )


def _after(sample: Sample, last: Record | None) -> bool:
    """Return whether a picture's fate was decided under the setting that `last` put in force."""
    if last is None:
        return True
    begun_s = sample.joined_s if last.knob == "arMaxNumSeqs" else sample.started_s
    return begun_s >= last.time_s


def _judge(
    last: Record | None,
    window: Sequence[Sample],
    seen: Score,
    setting: Setting,
    costs: Calibrated,
    history: tuple[Record, ...],
    goal: Goal,
    guard: Guard,
    plant: Plant,
) -> tuple[Record | None, tuple[Record, ...]]:
    """Return the verdict on the last change, and the history with it: would the old setting have served these better?

    Both settings draw the same pictures on paper, with costs that were by now seen under both: so neither a load that grew
    nor one that fell is taken for the change's doing. What is seen counts against a change by itself only where it is far
    beyond anything that this explains.
    """
    if last is None or last.outcome not in ("pending", "revert"):
        return None, history
    if last.outcome == "revert":
        verdict = replace(last, outcome="kept", p95_after_s=seen.p95_s)
    else:
        again = _Again(window, Costs(costs.profile), goal, plant)
        old, new = (again.score(last.knob, there).p95_s for there in (moved(setting, last.knob, last.old), setting))
        worst = 1 + guard.max_regression
        worse = new > old * worst or seen.p95_s > max(old, new) * worst * UNEXPLAINED
        is_reverted = worse and seen.p95_s > last.p95_before_s
        verdict = replace(last, outcome="reverted" if is_reverted else "kept", p95_after_s=seen.p95_s)
    return verdict, tuple(verdict if record is last else record for record in history)


def _revert(judged: Record, seen: Score, now_s: float, history: tuple[Record, ...], costs: Calibrated) -> Answer:
    said = f"p95 is {seen.p95_s:.2f} s after {judged.knob} {judged.old:g} to {judged.new:g}; {judged.p95_expected_s:.2f} s was expected, {judged.p95_before_s:.2f} s before"  # fmt: skip
    record = Record(
        now_s, judged.knob, judged.new, judged.old, "Regressed", said, seen.p95_s, judged.p95_before_s, "revert"
    )
    return Answer("Reverted", said, (*history, record)[-MAX_RECORDS:], record, judged, doubt=costs.doubt, now=seen)


def _search(
    seen: Sequence[Sample],
    setting: Setting,
    limits: Limits,
    costs: Calibrated,
    history: Sequence[Record],
    now_s: float,
    goal: Goal,
    plant: Plant,
) -> tuple[_Option | None, Score, str]:
    """Return the best change, what staying would give, and the comparison in words."""

    recent = seen[-MAX_PICTURES:]
    table = Costs(costs.profile)
    again = _Again(recent, table, goal, plant)
    now = again.score("ditMaxNumSeqs", setting)
    options = []
    for knob, value in _moves(setting, limits, recent, table):
        if _is_barred(knob, value, history, now_s):
            continue
        there = again.score(knob, moved(setting, knob, value))
        options.append(_Option(knob, value, there, there.gain_over(again.score(knob, setting), goal.kind)))
    told = _comparison(len(recent), setting, now, options)
    better = [option for option in options if option.gain >= _min_gain(option, setting, history, now_s)]
    if better:  # the next best would be as much of an accident as the best
        option = max(better, key=lambda option: option.gain)
        if len(seen) == len(recent) or _has_shifted(seen, recent):
            return option, now, told
        long = _Again(seen, table, goal, plant)
        there = long.score(option.knob, moved(setting, option.knob, option.value))
        if there.gain_over(long.score(option.knob, setting), goal.kind) >= MIN_GAIN / 2:
            return option, now, told
    idle = [option for option in options if option.knob == "requestBatchMaxWaitMs" and option.value < setting.wait_ms and option.gain >= 0]  # fmt: skip
    return min(idle, key=lambda option: option.value, default=None), now, told


def _has_shifted(seen: Sequence[Sample], recent: Sequence[Sample]) -> bool:
    """Return whether the latest pictures are another load than those before: other sizes, or another rate."""
    before = seen[: -len(recent)]
    shares = [
        {key: count / len(pictures) for key, count in Counter(sample.key for sample in pictures).items()}
        for pictures in (before, recent)
    ]
    mix = sum(abs(shares[0].get(key, 0.0) - shares[1].get(key, 0.0)) for key in shares[0].keys() | shares[1].keys()) / 2
    rates = [
        len(pictures) / max(max(s.ask.at_s for s in pictures) - min(s.ask.at_s for s in pictures), 1e-9)
        for pictures in (before, recent)
    ]
    return mix > MAX_MIX_MOVED or not 1 / MAX_RATE_MOVED <= rates[1] / rates[0] <= MAX_RATE_MOVED


def _moves(setting: Setting, limits: Limits, recent: Sequence[Sample], costs: Costs) -> list[tuple[Knob, float]]:
    """Return the changes worth a prediction: caps go up by one picture and down by any number, the wait to any usual value.

    Waiting is only worth one where a wave costs less than its pictures one by one; the AR cap only where pictures wait for
    it, or where rows slow each other down.
    """
    cap = setting.dit_max_num_seqs
    caps = range(limits.dit[0], min(cap + 1, limits.dit[1]) + 1)
    sizes = {sample.ask.size for sample in recent}
    batching_pays = any(costs.wave_s(size, 50, n) < n * costs.wave_s(size, 50, 1) for size in sizes for n in caps)
    usual = WAITS_MS if batching_pays and cap > 1 else (0.0,)
    waits = {min(max(wait, limits.wait_ms[0]), limits.wait_ms[1]) for wait in usual}
    moves: list[tuple[Knob, float]] = [("ditMaxNumSeqs", other) for other in caps if other != cap]
    moves += [("requestBatchMaxWaitMs", wait) for wait in sorted(waits) if wait != setting.wait_ms]
    rows = setting.ar_max_num_seqs
    fewer = max(rows - max(1, int(rows * AR_STEP)), limits.ar[0])
    context = recent[-1].ask.num_tokens
    waited_s = percentile([sample.joined_s - sample.ask.at_s for sample in recent], 0.95)
    if rows < limits.ar[1] and waited_s > IDLE_WAIT_S:
        more = max(sample.ask.rows for sample in recent)  # a guided picture has two rows, and joins with both
        moves.append(("arMaxNumSeqs", min(rows + more, limits.ar[1])))
    if fewer < rows and costs.decode_s(rows, context) > costs.decode_s(fewer, context) * (1 + MIN_GAIN):
        moves.append(("arMaxNumSeqs", fewer))
    return moves


class _Again:
    """Pictures that are drawn again under other settings. Only for the AR cap does the AR stage write again."""

    def __init__(self, pictures: Sequence[Sample], costs: Costs, goal: Goal, plant: Plant) -> None:
        self._pictures, self._world = pictures, (costs, goal, plant)
        self._trials: dict[bool, Asked | Written] = {}
        self._scores: dict[tuple[bool, Setting], Score] = {}

    def score(self, knob: Knob, setting: Setting) -> Score:
        """Return how they fare under `setting`, which differs from theirs in `knob` at most."""
        writes = knob == "arMaxNumSeqs"
        if writes not in self._trials:
            self._trials[writes] = (
                Asked(sorted((sample.ask for sample in self._pictures), key=attrgetter("at_s")), *self._world)
                if writes
                else Written(self._pictures, *self._world)
            )
        if (writes, setting) not in self._scores:
            self._scores[writes, setting] = self._trials[writes].score(setting)
        return self._scores[writes, setting]


def moved(setting: Setting, knob: Knob, value: float) -> Setting:
    """Return `setting` with one knob at `value`."""
    match knob:
        case "ditMaxNumSeqs":
            return replace(setting, dit_max_num_seqs=int(value))
        case "requestBatchMaxWaitMs":
            return replace(setting, wait_ms=float(value))
        case "arMaxNumSeqs":
            return replace(setting, ar_max_num_seqs=int(value))


def _value(setting: Setting, knob: Knob) -> float:
    return {"ditMaxNumSeqs": float(setting.dit_max_num_seqs), "requestBatchMaxWaitMs": setting.wait_ms, "arMaxNumSeqs": float(setting.ar_max_num_seqs)}[knob]  # fmt: skip


def _is_barred(knob: Knob, value: float, history: Sequence[Record], now_s: float) -> bool:
    """Return whether this was tried and taken back not long ago."""
    return any(
        record.outcome == "reverted"
        and record.knob == knob
        and record.new == value
        and now_s - record.time_s < MEMORY_S
        for record in history
    )


def _min_gain(option: _Option, setting: Setting, history: Sequence[Record], now_s: float) -> float:
    """Return the gain that a change needs: more where it turns a knob back soon after it was turned."""
    up = option.value > _value(setting, option.knob)
    turned = [
        record for record in history
        if record.knob == option.knob and record.outcome != "recommended" and now_s - record.time_s < BACK_S
    ]  # fmt: skip
    return MIN_GAIN_BACK if turned and (turned[-1].new > turned[-1].old) != up else MIN_GAIN


def _why(best: _Option, old: float, now: Score, goal: Goal) -> str:
    if goal.kind == "slo" and now.miss > 0:
        return "MissesSlo"
    if best.knob == "requestBatchMaxWaitMs":
        return "WaitingPays" if best.value > old else "WaitingDoesNotPay"
    return "MoreAtOncePays" if best.value > old else "FewerAtOncePay"


def _comparison(num: int, setting: Setting, now: Score, options: Sequence[_Option]) -> str:
    """Return the inputs, what staying is predicted to give, and the best alternatives."""
    ranked = sorted(options, key=lambda option: -option.gain)[:4]
    others = "; ".join(f"{option.knob} {option.value:g}: {_figures(option.score)}" for option in ranked)
    return f"{num} pictures drawn again with AR {setting.ar_max_num_seqs}, DiT {setting.dit_max_num_seqs}, wait {setting.wait_ms:g} ms: {_figures(now)}. Instead, {others}"  # fmt: skip


def _figures(score: Score) -> str:
    return f"p95 {score.p95_s:.2f} s, {score.images_per_s:.2f} images/s"


def _sentence(record: Record) -> str:
    return f"{record.knob} {record.old:g} to {record.new:g} ({record.reason}): p95 {record.p95_before_s:.2f} s, {record.p95_expected_s:.2f} s expected"  # fmt: skip

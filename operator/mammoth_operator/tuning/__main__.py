"""Translate: `python -m mammoth_operator.tuning` reads a what-if question as JSON on stdin and answers as JSON on stdout.

The question: profile (its JSON), trace (lines of JSON) or rate_per_s with sizes (side to weight), steps, hours and seed;
promises, gpus. Exit code 2 and a line on stderr for a question that cannot be answered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from mammoth_operator.tuning.objective import Goal, Promise
from mammoth_operator.tuning.planner import Budget
from mammoth_operator.tuning.profile import Profile, ProfileError
from mammoth_operator.tuning.samples import Ask
from mammoth_operator.tuning.traces import Phase, TraceError, arrivals, load
from mammoth_operator.tuning.twin import Plant
from mammoth_operator.tuning.whatif import advise

__all__ = ["main"]

MAX_REPLICAS = 64


def main() -> int:
    """Answer one question."""
    try:
        question = json.load(sys.stdin)
        advice = advise(
            Profile.parse(question["profile"]), _asks(question), _goal(question), _budget(question), Plant(question.get("ar_capacity", 32))
        )  # fmt: skip
    except (ProfileError, TraceError, ValueError, KeyError, TypeError) as err:
        print(f"mammoth-plan: {err}", file=sys.stderr)
        return 2
    json.dump(advice.data(), sys.stdout)
    return 0


def _asks(question: Mapping[str, Any]) -> list[Ask]:
    if "trace" in question:
        return load(question["trace"])
    sizes = {int(side): float(weight) for side, weight in question["sizes"].items()}
    phase = Phase(3600 * question["hours"], question["rate_per_s"], sizes, question["steps"])
    asks = arrivals([phase], question["seed"])
    if not asks:
        raise TraceError("at this rate nobody asks for a picture in that time")
    return asks


def _goal(question: Mapping[str, Any]) -> Goal:
    return Goal("slo", tuple(Promise(**promise) for promise in question.get("promises", ())))


def _budget(question: Mapping[str, Any]) -> Budget:
    return Budget((1, MAX_REPLICAS), (1, MAX_REPLICAS), devices=question.get("gpus"))


if __name__ == "__main__":
    sys.exit(main())

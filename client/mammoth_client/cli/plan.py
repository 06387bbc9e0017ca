"""Translate: `mammoth plan` to a question to the operator's twin, and its answer to what to deploy and a plot in the terminal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mammoth_client.kube import Deployments, parse_name
from mammoth_wire.errors import EngineFailed, InvalidRequest, NotFound
from mammoth_wire.params import MAX_PIXELS, MAX_STEPS

__all__ = ["plan"]

BAR_WIDTH = 50
TIME_UNITS = ((1, "h"), (60, "min"), (3600, "s"))  # how many to an hour


@click.command()
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Lines of JSON: at_s, height, width, steps.",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Pictures a second, instead of a trace.")
@click.option("--sizes", default="1024", show_default=True, help="Sides in pixels with weights, such as 512:3,1024:1.")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(1, MAX_STEPS), help="Denoising steps.")
@click.option(
    "--hours",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 168, min_open=True),
    help="How long the rate lasts.",
)
@click.option("--seed", default=1, show_default=True, help="Of the arrivals.")
@click.option("--gpus", type=click.IntRange(min=2), help="Most devices of both pools together.")
@click.option(
    "--slo", multiple=True, help="Promise, such as small:512:8 (name, side in pixels, p95 in seconds). Any number."
)
@click.option("--profile", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="JSON of a boot profile.")
@click.option("--deployment", help="NAMESPACE/NAME whose measured profile is used.")
@click.option("--context", help="Context of the kubeconfig.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def plan(
    *, trace: Path | None, rate: float | None, sizes: str, steps: int, hours: float, seed: int, gpus: int | None,
    slo: Sequence[str], profile: Path | None, deployment: str | None, context: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Say what to deploy for a load, and what to expect of it."""
    if (trace is None) == (rate is None):
        raise InvalidRequest([("trace", "give --trace or --rate")])
    if (profile is None) == (deployment is None):
        raise InvalidRequest([("profile", "give --profile or --deployment")])
    question: dict[str, Any] = {
        "profile": json.loads(profile.read_text()) if profile else _measured(str(deployment), context),
        "promises": [_promise(text) for text in slo],
        **({"gpus": gpus} if gpus else {}),
        **({"trace": trace.read_text()} if trace else {"rate_per_s": rate, "sizes": _sizes(sizes), "steps": steps, "hours": hours, "seed": seed}),
    }  # fmt: skip
    answer = ask(question)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    console = Console(soft_wrap=True)
    console.print(_deployed(answer))
    console.print(_plot(answer["p95_by_time"]))


def ask(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the twin's answer. Raises InvalidRequest for a question it cannot answer."""
    done = subprocess.run(
        [sys.executable, "-m", "mammoth_operator.tuning"], input=json.dumps(question), capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode == 2:
        raise InvalidRequest([("plan", done.stderr.strip().removeprefix("mammoth-plan: "))])
    if done.returncode:
        raise EngineFailed(f"the planner exited with code {done.returncode}: {done.stderr[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _measured(deployment: str, context: str | None) -> Mapping[str, Any]:
    """Return the newest profile that the operator has measured for a deployment."""
    namespace, name = parse_name(deployment)
    data = Deployments(context).config(namespace, f"{name}-profile")
    if not data:
        raise NotFound(f"{namespace}/{name} has no measured profile yet")
    found: Mapping[str, Any] = json.loads(list(data.values())[-1])
    return found


def _sizes(text: str) -> dict[str, float]:
    """Return sides and weights of `512:3,1024`."""
    out = {}
    for part in text.split(","):
        side, _, weight = part.partition(":")
        if not side.strip().isdecimal() or int(side) < 16:
            raise InvalidRequest([("sizes", f"{part!r} is not SIDE or SIDE:WEIGHT, a side in pixels from 16 on")])
        out[side.strip()] = _number(weight or "1", "sizes")
    return out


def _promise(text: str) -> dict[str, Any]:
    """Return the promise of `NAME:SIDE:SECONDS`."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[1].isdecimal():
        raise InvalidRequest([("slo", f"{text!r} is not NAME:SIDE:SECONDS")])
    return {"name": parts[0], "max_pixels": min(int(parts[1]) ** 2, MAX_PIXELS), "p95_s": _number(parts[2], "slo")}


def _number(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise InvalidRequest([(field, f"{text!r} is no number above 0")])
    return value


def _deployed(answer: Mapping[str, Any]) -> Table:
    setting, expected = answer["setting"], answer["expected"]
    table = Table("what to deploy", "", title_justify="left")
    for label, value in (
        ("ar.replicas", setting["ar_replicas"]),
        ("dit.replicas", setting["dit_replicas"]),
        ("ar.maxNumSeqs", setting["ar_max_num_seqs"]),
        ("dit.maxNumSeqs", setting["dit_max_num_seqs"]),
        ("dit.requestBatchMaxWaitMs", f"{setting['wait_ms']:g}"),
        ("p95", f"{expected['p95_s']:.1f} s"),
        ("images an hour", f"{3600 * expected['images_per_s']:.0f}"),
        ("mean batch", f"{answer['mean_batch_size']:.2f}"),
        *((f"p95 of {name}", f"{seconds:.1f} s") for name, seconds in expected["class_p95_s"].items()),
        ("promises", "kept" if answer["kept"] else f"missed by {100 * expected['miss']:.0f} % with this many devices"),
    ):
        table.add_row(label, str(value))
    return table


def _plot(points: Sequence[Sequence[float]]) -> str:
    """Return p95 over time as bars. Times are written in the largest unit that tells one from the next."""
    most = max(seconds for _, seconds in points)
    nearest = min((later - now for (now, _), (later, _) in pairwise(points)), default=math.inf)
    times_an_hour, unit = next((pair for pair in TIME_UNITS if nearest * pair[0] >= 0.01), TIME_UNITS[-1])
    rows = [
        f"{hours * times_an_hour:7.2f} {unit} {'█' * max(round(BAR_WIDTH * seconds / most), 1)} {seconds:.1f} s"
        for hours, seconds in points
    ]
    return "p95 by time\n" + "\n".join(rows)

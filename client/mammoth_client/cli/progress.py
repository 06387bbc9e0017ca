"""Do: show a person how far a request is: bars on a terminal, a line now and then elsewhere. Both write to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mammoth_client.types import ArProgress, Batched, Event, Queued, Step

__all__ = ["Mark", "mark", "shown"]

PHASES = ("tokens", "steps")
NUM_LINES_A_PHASE = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a picture stands: `done` of `total` units of a phase, or, before the first unit, only a note."""

    image_index: int
    phase: str
    done: int = 0
    total: int | None = None
    note: str = ""


def mark(event: Event) -> Mark | None:
    """Return what an event says about progress, None when a person need not know."""
    match event:
        case ArProgress(index, tokens, total):
            return Mark(index, "tokens", tokens, total)
        case Queued(index, position, eta_s):
            return Mark(index, "steps", note=f"{position} ahead in the queue{_eta(eta_s)}")
        case Batched(index, size):
            return Mark(index, "steps", note=f"in a wave of {size}")
        case Step(index, done, total, eta_s):
            return Mark(index, "steps", done, total, _eta(eta_s).removeprefix(", "))
        case _:
            return None


@contextmanager
def shown(*, quiet: bool, lines_a_phase: int = NUM_LINES_A_PHASE) -> Iterator[Callable[[Event], None] | None]:
    """Yield a callback that shows events, None when `quiet`; `lines_a_phase` is for what is no terminal."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        columns = (TextColumn("picture {task.fields[number]}  {task.description:<6}"), BarColumn(),
                   TextColumn("{task.fields[count]:>11}"), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
        with Progress(*columns, console=console) as progress:
            yield Bars(progress)
    else:
        yield Lines(lambda line: click.echo(line, err=True), lines_a_phase=lines_a_phase)


class Bars:
    """Two bars for every picture, tokens and steps, from its first event on; the clock of each runs from its first unit."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[tuple[int, str], TaskID] = {}

    def __call__(self, event: Event) -> None:
        now = mark(event)
        if now is None:
            return
        task = self._task(now.image_index, now.phase)
        if now.total is not None:
            self._progress.start_task(task)
        count = "" if now.total is None else f"{now.done}/{now.total}"
        self._progress.update(task, completed=now.done, total=now.total, count=count, note=now.note)

    def _task(self, number: int, phase: str) -> TaskID:
        if (number, phase) not in self._tasks:
            for name in PHASES:
                task = self._progress.add_task(name, start=False, total=None, number=number, count="", note="")
                self._tasks[number, name] = task
        return self._tasks[number, phase]


class Lines:
    """A line for a picture's first place in the queue, for its wave, and for every finished part of a phase."""

    def __init__(self, write: Callable[[str], None], *, lines_a_phase: int = NUM_LINES_A_PHASE) -> None:
        self._write = write
        self._lines_a_phase = lines_a_phase
        self._said: set[tuple[int, object]] = set()

    def __call__(self, event: Event) -> None:
        now = mark(event)
        if now is None:
            return
        part = 0 if now.total is None else now.done * self._lines_a_phase // max(1, now.total)
        key = (now.image_index, type(event) if now.total is None else (now.phase, part))
        if key in self._said or (now.total is not None and part == 0):
            return
        self._said.add(key)
        what = now.note if now.total is None else f"{now.phase} {now.done}/{now.total}"
        self._write(f"picture {now.image_index}: {what}")


def _eta(eta_s: float | None) -> str:
    return "" if eta_s is None else f", about {eta_s:.0f} s to go"

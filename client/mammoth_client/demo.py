"""Do: the whole product on one machine: start both stages, ask for several pictures at once, show where the time goes.

    python -m mammoth_client.demo [--model DIR] [--out demo-output]

Without a model it draws with the checkpoint that ships with a source checkout. Where that is missing, a tiny random
checkpoint is made in the output folder and kept for the next run; its pictures are noise. The exit code is 0 only if every
picture arrived and its pixels have the digest that its receipt names.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from mammoth_client.cli.app import FAILED, exit_code
from mammoth_client.cli.files import made_folder
from mammoth_client.cli.progress import shown
from mammoth_client.client import AsyncClient
from mammoth_client.pipeline import pipeline
from mammoth_client.process import run_module
from mammoth_client.shipped import shipped_checkpoint
from mammoth_client.types import Accepted, Batched, Event, Picture
from mammoth_wire.errors import InvalidRequest, MammothError

__all__ = ["Wish", "main", "waves", "wishes"]

LINES_A_PHASE = 1
COMPANY_MS = 400  # longest wait of the idle DiT for company: enough for equal sizes to meet, even on a busy laptop
SHEET_COLUMNS, SHEET_GAP_PX = 4, 8


@dataclass(frozen=True, slots=True)
class Wish:
    """One picture to ask for."""

    prompt: str
    width: int
    height: int
    seed: int
    steps: int = 12
    guidance: float | None = None


EMOJI = ("a mammoth", "a red apple", "a pizza", "a rocket", "a penguin", "an owl", "a cactus", "a guitar")
SHIPPED_WISHES = tuple(Wish(name, 128, 128, seed, steps=20, guidance=4.0) for seed, name in enumerate(EMOJI, 1))
WISHES = (
    Wish("a mammoth in the snow", 128, 128, 1),
    Wish("a mammoth in the snow", 128, 128, 2),
    Wish("a mammoth in the snow", 128, 128, 3),
    Wish("a mammoth under a comet", 192, 192, 4),
    Wish("a mammoth under a comet", 192, 192, 5),
    Wish("a mammoth at the sea", 256, 192, 6),
    Wish("a mammoth at the sea", 256, 192, 7),
    Wish("a herd at dawn", 256, 256, 8),
)


@dataclass(slots=True)
class Course:
    """How one wish went: when its wave began and how large it was, when it ended, and the picture or the error."""

    number: int
    wish: Wish
    began_at: float = field(default_factory=time.perf_counter)
    batched_at: float = 0.0
    wave_size: int = 0
    total_s: float = 0.0
    outcome: Picture | MammothError | None = None

    @property
    def picture(self) -> Picture | None:
        return self.outcome if isinstance(self.outcome, Picture) else None

    @property
    def stem(self) -> str:
        return f"{self.number:02d}-{self.wish.width}x{self.wish.height}-seed{self.wish.seed}"

    def see(self, event: Event) -> None:
        if isinstance(event, Batched):
            self.batched_at, self.wave_size = time.perf_counter(), event.size


def wishes(model: Path | None, shipped: Path | None) -> tuple[Wish, ...]:
    """Return what to ask of `model`: what the shipped checkpoint knows, or pictures of several sizes of any other."""
    known = model is not None and shipped is not None and model.resolve() == shipped.resolve()
    return SHIPPED_WISHES if known else WISHES


def waves(joined: Sequence[tuple[float, int, int]]) -> list[list[int]]:
    """Return which pictures were drawn together, from (when it joined, size of its wave, number) of each.

    One device draws one wave after the other, so in order of joining a wave's pictures stand side by side.
    """
    rest = sorted(joined)
    found = []
    while rest:
        size = max(1, rest[0][1])
        found.append(sorted(number for _, _, number in rest[:size]))
        rest = rest[size:]
    return found


async def draw(address: str, courses: Sequence[Course], on_event: Callable[[Event], None] | None) -> None:
    """Ask for every picture at once; a picture that fails ends its own course and no other."""
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        for course in courses:
            tasks.create_task(_draw(client, course, on_event))


async def _draw(client: AsyncClient, course: Course, on_event: Callable[[Event], None] | None) -> None:
    wish = course.wish

    def see(event: Event) -> None:
        course.see(event)
        if on_event is not None and not isinstance(event, Accepted):
            on_event(replace(event, image_index=course.number))

    course.began_at = time.perf_counter()
    try:
        [course.outcome] = await client.generate(
            wish.prompt, on_event=see, width=wish.width, height=wish.height, seed=wish.seed, steps=wish.steps,
            guidance=wish.guidance,
        )  # fmt: skip
    except MammothError as err:
        course.outcome = err
    course.total_s = time.perf_counter() - course.began_at


def tiny_checkpoint(folder: Path) -> Path:
    """Return `folder` with a tiny checkpoint in it, which is made when there is no whole one."""
    if not (folder / "complete").exists():
        run_module(["mammoth_ar.tiny", str(folder)])
        run_module(["mammoth_dit.tiny", str(folder)])
        (folder / "complete").touch()
    return folder


def save(courses: Sequence[Course], out: Path) -> None:
    """Write every picture, its receipt, and one sheet of them all. Raises InvalidRequest without Pillow."""
    for course in courses:
        if course.picture is not None:
            course.picture.save(out / f"{course.stem}.png")
            (out / f"{course.stem}.receipt.json").write_text(course.picture.receipt.to_json())
    _contact_sheet([course.picture for course in courses if course.picture is not None], out / "contact-sheet.png")


def _contact_sheet(pictures: Sequence[Picture], path: Path) -> None:
    """Lay the pictures out in a grid, each in the middle of an equal cell."""
    try:
        from PIL import Image
    except ImportError as err:
        raise InvalidRequest([("pillow", "is not installed: pip install pillow")]) from err
    images = [picture.to_pil() for picture in pictures]
    if not images:
        return
    cell_width, cell_height = (
        max(sides) + SHEET_GAP_PX for sides in zip(*(image.size for image in images), strict=True)
    )
    columns = min(SHEET_COLUMNS, len(images))
    num_lines = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * cell_width, num_lines * cell_height), "white")
    for place, image in enumerate(images):
        left = place % columns * cell_width + (cell_width - image.width) // 2
        top = place // columns * cell_height + (cell_height - image.height) // 2
        sheet.paste(image, (left, top))
    sheet.save(path)


def table(courses: Sequence[Course]) -> Table:
    """Return a line for every picture: what it was drawn with and where its seconds went."""
    joined = [(course.batched_at, course.wave_size, course.number) for course in courses if course.wave_size]
    mates = {number: wave for wave in waves(joined) for number in wave}
    found = Table(title="Times in seconds", title_justify="left", box=None)
    for name in ("#", "size", "seed", "waited", "batched with", "AR", "hand over", "denoise", "VAE", "PNG", "total"):
        found.add_column(name, justify="left" if name == "batched with" else "right")
    for course in courses:
        wish, others = course.wish, [str(n) for n in mates.get(course.number, []) if n != course.number]
        found.add_row(
            str(course.number), f"{wish.width}x{wish.height}", str(wish.seed), *_cells(course, ", ".join(others) or "-")
        )
    return found


def _cells(course: Course, mates: str) -> list[str]:
    if course.picture is None:
        assert isinstance(course.outcome, MammothError)
        return ["", f"failed: {course.outcome.message}"]
    times = course.picture.times
    waited_s = times.ar_queue_s + times.queue_s
    drawn_s = (times.denoise_s, times.decode_s, times.encode_s, course.total_s)
    return [
        f"{waited_s:.2f}",
        mates,
        f"{times.ar_s:.2f}",
        *(f"{part_s:.3f}" for part_s in (times.handover_s, *drawn_s)),
    ]


@contextmanager
def _timed(name: str, spent: list[str]) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    spent.append(f"{name} {time.perf_counter() - began_s:.1f} s")


def run(model: Path | None, out: Path, num_pictures: int) -> bool:
    """Run the demo and return whether every picture arrived and is what its receipt says."""
    console, spent, began_s = Console(), list[str](), time.perf_counter()
    made_folder(out, field="out")
    shipped = shipped_checkpoint()
    model = model or shipped
    courses = [Course(number, wish) for number, wish in enumerate(wishes(model, shipped)[:num_pictures], 1)]
    if model is None:
        with _timed("checkpoint", spent):
            model = tiny_checkpoint(out / "checkpoint")
    console.print(f"starting both stages of {model} (logs: {out / 'logs'})")
    begin_s = time.perf_counter()
    with pipeline(model, log_dir=out / "logs", dit_request_batch_max_wait_ms=COMPANY_MS) as stages:
        spent.append(f"start {time.perf_counter() - begin_s:.1f} s")
        console.print(f"serving on {stages.address}; asking for {len(courses)} pictures at once")
        with _timed("pictures", spent), shown(quiet=False, lines_a_phase=LINES_A_PHASE) as on_event:
            asyncio.run(draw(stages.address, courses, on_event))
    save(courses, out)
    wrong = [course.number for course in courses if course.picture is None or not course.picture.verify()]
    console.print(table(courses))
    console.print(f"{len(courses) - len(wrong)} of {len(courses)} pictures are as their receipts say; see {out}")
    console.print(f"{', '.join(spent)}, all of it {time.perf_counter() - began_s:.1f} s; both stages have stopped")
    return not wrong


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Checkpoint folder; the one that ships unless given.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-output"), show_default=True,
              help="Folder for pictures, receipts, logs and the tiny checkpoint.")  # fmt: skip
@click.option(
    "--pictures", type=click.IntRange(1, len(WISHES)), default=len(WISHES), show_default=True, help="How many."
)
def main(model: Path | None, out: Path, pictures: int) -> None:
    """Start both stages, draw several pictures at once, and show what was batched with what and the time per stage."""
    try:
        sys.exit(0 if run(model, out, pictures) else FAILED)
    except MammothError as err:
        click.echo(f"demo: {err.message}", err=True)
        sys.exit(exit_code(err))


if __name__ == "__main__":
    main()

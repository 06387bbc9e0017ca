"""Translate: `mammoth serve` and `mammoth make-tiny`: the commands that start the stages' own programs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mammoth_client.cli.options import settings
from mammoth_client.pipeline import pipeline
from mammoth_client.process import run_module
from mammoth_wire.errors import InvalidRequest

__all__ = ["make_tiny", "serve"]


@click.command()
@click.option("--model", required=True, help="Checkpoint folder or repository.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=50051, show_default=True, help="Public port; 0 takes a free one."
)
@click.option("--device", help="Device of both stages, such as cpu or cuda:0.")
@click.option("--num-dits", type=click.IntRange(1, 64), default=1, show_default=True, help="DiT processes.")
@click.option(
    "--ar",
    "ar_flags",
    callback=settings,
    metavar="NAME=VALUE",
    multiple=True,
    help="Flag of the AR stage; may be repeated.",
)
@click.option(
    "--dit",
    "dit_flags",
    callback=settings,
    metavar="NAME=VALUE",
    multiple=True,
    help="Flag of the DiT stages; may be repeated.",
)
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Keep the logs in this folder.")
@click.option(
    "--start-timeout",
    "start_timeout_s",
    type=float,
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up if a stage does not serve by then.",
)
@click.option(
    "--grace", "grace_s", type=float, default=30.0, show_default=True, metavar="SECONDS", help="Time to drain."
)
def serve(
    *, model: str, device: str | None, ar_flags: Mapping[str, str], dit_flags: Mapping[str, str],
    port: int, num_dits: int, log_dir: Path | None, start_timeout_s: float, grace_s: float,
) -> None:  # fmt: skip
    """Run both stages of a model on this machine until Ctrl-C.

    Stages take flags of their own, for example: --ar max-num-seqs=8 --dit batching=step
    """
    flags: dict[str, Any] = {"device": device} if device else {}
    flags |= {f"ar_{name}": value for name, value in ar_flags.items()}
    flags |= {f"dit_{name}": value for name, value in dit_flags.items()}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pipeline(
            model, port=port, num_dits=num_dits, log_dir=log_dir, start_timeout_s=start_timeout_s, grace_s=grace_s,
            **flags,
        ) as stages:  # fmt: skip
            click.echo(f"serving on {stages.address}")
            stages.wait()
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


@click.command("make-tiny", short_help="Write a tiny random checkpoint to FOLDER.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--family", type=click.Choice(["preview", "dev"]), default="preview", show_default=True)
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
def make_tiny(folder: Path, family: str, force: bool) -> None:
    """Write a tiny random checkpoint to FOLDER: the real format at toy width, whose pictures are noise."""
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise InvalidRequest([("folder", f"{folder} is not empty; --force writes into it")])
    run_module(["mammoth_ar.tiny", str(folder), "--family", family])
    run_module(["mammoth_dit.tiny", str(folder)])
    click.echo(f"{folder}  {family}")

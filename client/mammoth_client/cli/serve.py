"""Translate: `mammoth serve` and `mammoth make-tiny`: the commands that start the stages' own programs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mammoth_client.cli.app import USAGE
from mammoth_client.cli.files import made_folder
from mammoth_client.cli.options import MIN_TIMEOUT_S, seconds, settings
from mammoth_client.pipeline import pipeline
from mammoth_client.process import run_module
from mammoth_client.shipped import shipped_checkpoint
from mammoth_wire.errors import InvalidRequest

__all__ = ["make_tiny", "serve"]

MAX_START_S = 24 * 3600.0
MAX_GRACE_S = 3600.0


@click.command()
@click.option(
    "--model", envvar="MAMMOTH_MODEL", help="Checkpoint folder or repository; the one that ships unless given."
)
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
    type=str,
    callback=seconds(MIN_TIMEOUT_S, MAX_START_S),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up if a stage does not serve by then.",
)
@click.option(
    "--grace",
    "grace_s",
    type=str,
    callback=seconds(0.0, MAX_GRACE_S),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to drain.",
)
def serve(
    *, model: str | None, device: str | None, ar_flags: Mapping[str, str], dit_flags: Mapping[str, str],
    port: int, num_dits: int, log_dir: Path | None, start_timeout_s: float, grace_s: float,
) -> int:  # fmt: skip
    """Run both stages of a model on this machine until Ctrl-C, SIGTERM or SIGHUP.

    Stages take flags of their own, for example: --ar max-num-seqs=8 --dit batching=step
    """
    flags: dict[str, Any] = {"device": device} if device else {}
    flags |= {f"ar_{name}": value for name, value in ar_flags.items()}
    flags |= {f"dit_{name}": value for name, value in dit_flags.items()}
    if log_dir is not None:
        made_folder(log_dir, field="log-dir")
    served = model or _shipped()
    _stop_on_signals()
    try:
        with pipeline(
            served, port=port, num_dits=num_dits, log_dir=log_dir, start_timeout_s=start_timeout_s, grace_s=grace_s,
            **flags,
        ) as stages:  # fmt: skip
            click.echo(f"serving on {stages.address}")
            stages.wait()
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    except InvalidRequest as err:
        click.echo("\n".join(f"{who}: {what}" for who, what in err.violations), err=True)
        return USAGE
    return 0


def _shipped() -> str:
    folder = shipped_checkpoint()
    if folder is None:
        text = "no checkpoint ships with this installation: pass --model FOLDER_OR_REPOSITORY, or set MAMMOTH_MODEL"
        raise InvalidRequest([("model", text)])
    return str(folder)


def _stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does; what is ignored (nohup) stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@click.command("make-tiny", short_help="Write a tiny random checkpoint to FOLDER.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--family", type=click.Choice(["preview", "dev"]), default="preview", show_default=True)
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
def make_tiny(folder: Path, family: str, force: bool) -> None:
    """Write a tiny random checkpoint to FOLDER: the real format at toy width, whose pictures are noise."""
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise InvalidRequest([("folder", f"{folder} is not empty; --force writes into it")])
    made_folder(folder, field="folder")
    run_module(["mammoth_ar.tiny", str(folder), "--family", family])
    run_module(["mammoth_dit.tiny", str(folder)])
    click.echo(f"{folder}  {family}")

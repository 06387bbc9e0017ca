"""Translate: a stage's command line to a served stage and an exit code that a supervisor understands."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from mammoth_serving.checkpoint import CheckpointError
from mammoth_serving.config import ConfigError, ServingSettings, load
from mammoth_serving.lifecycle import Gate, Stage, serve
from mammoth_serving.telemetry import configure_logging

__all__ = ["run_stage"]

S = TypeVar("S", bound=ServingSettings)
EXIT_STOPPED, EXIT_DIED, EXIT_UNUSABLE = 0, 1, 2

logger = logging.getLogger(__name__)


def run_stage(prog: str, kind: type[S], argv: Sequence[str], build: Callable[[S, Gate], Stage]) -> int:
    """Serve the stage that `build` makes of the settings until it is told to stop; return the exit code.

    0: stopped and drained. 1: the engine died; its traceback is in the log. 2: bad settings, a taken port or an unusable
    checkpoint, said in a line each on stderr.
    """
    try:
        settings = load(kind, argv, os.environ, prog=prog)
        configure_logging(settings.log_level, prog)
        asyncio.run(_serve(settings, build))
    except (ConfigError, CheckpointError) as err:
        for line in str(err).splitlines():
            print(f"{prog}: {line}", file=sys.stderr)
        return EXIT_UNUSABLE
    except Exception:
        logger.exception("the stage died")
        raise
    return EXIT_STOPPED


async def _serve(settings: S, build: Callable[[S, Gate], Stage]) -> None:
    gate = Gate()
    await serve(build(settings, gate), gate, settings)

"""Translate: the command line `mammoth-ar` to a served AR stage and an exit code."""

from __future__ import annotations

import sys

from mammoth_ar.settings import ArSettings
from mammoth_ar.stage import ArStage
from mammoth_serving.command import run_stage

__all__ = ["main"]


def main() -> int:
    """Serve the AR stage; see `run_stage` for the exit codes."""
    return run_stage("mammoth-ar", ArSettings, sys.argv[1:], ArStage)


if __name__ == "__main__":
    sys.exit(main())

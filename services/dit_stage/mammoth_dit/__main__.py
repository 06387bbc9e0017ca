"""Translate: the command line `mammoth-dit` to a served DiT stage and an exit code."""

from __future__ import annotations

import sys

from mammoth_dit.settings import DitSettings
from mammoth_dit.stage import DitStage
from mammoth_serving.command import run_stage

__all__ = ["main"]


def main() -> int:
    """Serve the DiT stage; see `run_stage` for the exit codes."""
    return run_stage("mammoth-dit", DitSettings, sys.argv[1:], DitStage)


if __name__ == "__main__":
    sys.exit(main())

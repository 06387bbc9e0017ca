"""Translate: the command line `mammoth-operator` to a running operator and an exit code."""

from __future__ import annotations

import asyncio
import os
import sys

from mammoth_operator.logs import configure
from mammoth_operator.running import Operator
from mammoth_operator.settings import OperatorSettings, load

__all__ = ["main"]


def main() -> int:
    """Run until a signal; return 0. Anything else that ends it raises, and the pod is restarted."""
    settings = load(sys.argv[1:], os.environ)
    configure(settings.log_level, settings.log_format)
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: OperatorSettings) -> None:
    await Operator(settings).run()


if __name__ == "__main__":
    sys.exit(main())

"""The `mammoth` command: generate, replay and status talk to a server; serve and make-tiny start one; deploy and
tune look at a cluster, and plan asks the twin."""

from __future__ import annotations

import click

from mammoth_client.cli.app import App
from mammoth_client.cli.deploy import deploy
from mammoth_client.cli.generate import generate, replay
from mammoth_client.cli.plan import plan
from mammoth_client.cli.serve import make_tiny, serve
from mammoth_client.cli.status import status
from mammoth_client.cli.tune import tune

__all__ = ["app", "main"]


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mammoth-serve", prog_name="mammoth", message="%(prog)s %(version)s")
def app() -> None:
    """Text to image with MammothModa2.

    \b
    Exit codes: 0 ok, 1 replay differs, 2 bad input, 3 refused (try later), 4 unreachable, 5 failed on the server,
    130 interrupted.
    """


for command in (generate, status, replay, serve, make_tiny, deploy, plan, tune):
    app.add_command(command)


def main() -> None:
    """Run the command line and exit with its code."""
    app()


if __name__ == "__main__":
    main()

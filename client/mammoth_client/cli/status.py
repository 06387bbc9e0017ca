"""Translate: `mammoth status`: the health of a server as a table and an exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mammoth_client.cli.app import TRY_LATER
from mammoth_client.cli.options import connect, connection
from mammoth_client.client import STATUS_TIMEOUT_S
from mammoth_client.types import ServiceHealth

__all__ = ["status"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@connection
def status(as_json: bool, address: str, timeout_s: float, token_file: Path | None) -> int:
    """Show whether a server takes requests. Exits with 0 only if it does."""
    with connect(address, timeout_s, token_file) as client:
        services = client.status(timeout_s=min(timeout_s, STATUS_TIMEOUT_S))
    if as_json:
        click.echo(json.dumps({"address": address, "services": [asdict(service) for service in services]}, indent=2))
    else:
        Console().print(_table(address, services))
    return 0 if all(service.serving for service in services) else TRY_LATER


def _table(address: str, services: Sequence[ServiceHealth]) -> Table:
    table = Table("service", "state", title=Text(address), title_justify="left")
    for service in services:
        colour = "green" if service.serving else "red"
        table.add_row(service.service or "(server)", f"[{colour}]{service.state}[/]")
    return table

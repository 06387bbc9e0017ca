"""Translate: `mammoth deploy status|rollback|drain` to annotations and a table; and `--deployment` to an address."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from mammoth_client.cli.app import TRY_LATER
from mammoth_client.kube import Deployments, parse_name
from mammoth_wire.errors import InvalidRequest

__all__ = ["deploy", "reached"]

Command = TypeVar("Command", bound=Callable[..., Any])
REVISION, DRAIN = "mammoth.dev/revision", "mammoth.dev/drain"


def where(command: Command) -> Command:
    """Add the argument and options that name a deployment."""
    for option in (
        click.option("--context", help="Context of the kubeconfig."),
        click.option("-n", "--namespace", default="default", show_default=True, help="Namespace."),
        click.argument("name"),
    ):
        command = option(command)
    return command


@contextmanager
def reached(address: str, deployment: str | None) -> Iterator[str]:
    """Yield where the server is: `address`, or a forwarded port of the deployment."""
    if deployment is None:
        yield address
        return
    namespace, name = parse_name(deployment)
    with Deployments().forwarded(namespace, name) as local:
        yield local


@click.group()
def deploy() -> None:
    """Look at deployments in a cluster, and act on them."""


@deploy.command()
@where
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status(*, name: str, namespace: str, context: str | None, as_json: bool) -> int:
    """Show how NAME is doing. Exits with 0 only if it is ready."""
    found = Deployments(context).get(namespace, name)
    said = found.get("status", {})
    if as_json:
        click.echo(json.dumps(said, indent=2))
    else:
        Console(soft_wrap=True).print(*tables(said), sep="\n")
    return 0 if _is_true(said, "Ready") else TRY_LATER


@deploy.command()
@where
@click.option("--to", "revision", help="Revision to return to; the last ready one before the present unless given.")
@click.option("--undo", is_flag=True, help="Take the pin away: run what the spec says.")
def rollback(*, name: str, namespace: str, context: str | None, revision: str | None, undo: bool) -> None:
    """Pin NAME to an earlier revision, until --undo."""
    deployments = Deployments(context)
    if undo:
        deployments.annotate(namespace, name, {REVISION: None})
        click.echo(f"{namespace}/{name} runs what its spec says")
        return
    chosen = choose(deployments.get(namespace, name).get("status", {}), revision)
    deployments.annotate(namespace, name, {REVISION: chosen})
    click.echo(
        f"{namespace}/{name} returns to {chosen}; mammoth deploy rollback {name} -n {namespace} --undo goes back"
    )


@deploy.command()
@where
@click.option("--undo", is_flag=True, help="Serve again.")
def drain(*, name: str, namespace: str, context: str | None, undo: bool) -> None:
    """Let NAME finish its work and stop its pods, without deleting it."""
    Deployments(context).annotate(namespace, name, {DRAIN: None if undo else "true"})
    click.echo(f"{namespace}/{name} {'serves again' if undo else 'finishes its work and stops; --undo serves again'}")


def choose(status: Mapping[str, Any], asked: str | None) -> str:
    """Return the revision to return to. Raises InvalidRequest naming those that there are."""
    known = [entry["hash"] for entry in status.get("revisions", ())]
    target = status.get("targetRevision")
    if asked is not None:
        if asked not in known:
            raise InvalidRequest([("to", f"{asked} is not one of {', '.join(known) or 'no revisions'}")])
        return asked
    ready = [e["hash"] for e in status.get("revisions", ()) if e.get("outcome") == "ready" and e["hash"] != target]
    if not ready:
        raise InvalidRequest([("to", "there is no earlier revision that was ready")])
    return str(ready[0])


def tables(status: Mapping[str, Any]) -> list[Table]:
    """Return what a person wants to see first: pools, conditions, revisions."""
    pools = _table(
        "pool",
        "ready",
        "in flight",
        "queued",
        "blocked by",
        title=f"{status.get('phase', 'not seen yet')} {status.get('endpoint', '')}",
    )
    for pool in ("ar", "dit"):
        seen = status.get(pool, {})
        pools.add_row(pool, seen.get("summary", ""), str(seen.get("inflight", "")), str(seen.get("queueDepth", "")), seen.get("blockedReason", ""))  # fmt: skip
    conditions = _table("condition", "status", "reason", "message")
    for item in status.get("conditions", ()):
        conditions.add_row(item["type"], item["status"], item["reason"], item["message"])
    revisions = _table("revision", "outcome", "made", "ar image", "dit image")
    for entry in status.get("revisions", ()):
        mark = " *" if entry["hash"] == status.get("targetRevision") else ""
        revisions.add_row(entry["hash"] + mark, entry.get("outcome", ""), entry.get("time", ""), entry.get("arImage", ""), entry.get("ditImage", ""))  # fmt: skip
    return [pools, conditions, revisions]


def _table(*headers: str, title: str | None = None) -> Table:
    """Return a table that folds what is long instead of hiding its end."""
    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _is_true(status: Mapping[str, Any], kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in status.get("conditions", ()))

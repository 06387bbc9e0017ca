"""Translate: the operator's flags and variables to a frozen value. `--x-y` is `MAMMOTH_OPERATOR_X_Y`; a flag wins."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["OperatorSettings", "load"]

PREFIX = "MAMMOTH_OPERATOR_"
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """`namespaces` empty: all. `identity` is who holds the lease; it is trusted for a part of `lease_seconds`."""

    namespaces: tuple[str, ...]
    namespace: str
    identity: str
    lease_name: str
    lease_seconds: float
    host: str
    port: int
    network_policies: bool
    log_level: str
    log_format: str


def load(argv: Sequence[str], environ: Mapping[str, str]) -> OperatorSettings:
    """Return the settings; exits with a usage message when one is wrong."""

    def add(name: str, default: str, help: str, **options: object) -> None:
        variable = PREFIX + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", default=environ.get(variable, default), help=f"{help} ({variable}; default {default!r})", **options)  # type: ignore[arg-type]  # fmt: skip

    parser = argparse.ArgumentParser(prog="mammoth-operator", description="Serves MammothDeployment objects.", allow_abbrev=False)  # fmt: skip
    add("watch-namespaces", "", "comma list; empty: all of the cluster")
    add("namespace", "default", "where the operator runs and its lease lives")
    add("identity", environ.get("HOSTNAME", "mammoth-operator"), "name in the lease, unique to this process")
    add("lease-name", "mammoth-operator", "coordination Lease")
    add("lease-seconds", "60", "life of an unrenewed lease", type=float)
    add("host", "0.0.0.0", "address of the health port")
    add("port", "8080", "health and metrics over HTTP", type=int)
    add("network-policies", "true", "make NetworkPolicies", choices=("true", "false"))
    add("log-level", "info", "least severe level that is logged", choices=LEVELS)
    add("log-format", "json", "json or text", choices=("json", "text"))
    given = parser.parse_args(list(argv))
    return OperatorSettings(
        namespaces=tuple(name.strip() for name in given.watch_namespaces.split(",") if name.strip()),
        namespace=given.namespace,
        identity=given.identity,
        lease_name=given.lease_name,
        lease_seconds=float(given.lease_seconds),
        host=given.host,
        port=int(given.port),
        network_policies=given.network_policies == "true",
        log_level=given.log_level,
        log_format=given.log_format,
    )

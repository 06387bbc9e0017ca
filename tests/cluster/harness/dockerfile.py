"""Decide: what a Dockerfile says about how its image runs, so that the light image runs the same way."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

__all__ = ["run_config"]


def run_config(text: str) -> dict[str, Any]:
    """Return the OCI run configuration of the last stage of a Dockerfile: Env, User, WorkingDir, Entrypoint, ExposedPorts."""
    config: dict[str, Any] = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}
    for word, rest in _last_stage(text):
        match word:
            case "ENV":
                config["Env"] += shlex.split(rest)
            case "USER":
                config["User"] = rest
            case "WORKDIR":
                config["WorkingDir"] = rest
            case "ENTRYPOINT":
                config["Entrypoint"] = json.loads(rest)
            case "EXPOSE":
                config["ExposedPorts"] = {f"{port}/tcp": {} for port in rest.split()}
    return config


def _last_stage(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    instructions = [line.strip() for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines() if line.strip()]
    start = max(place for place, line in enumerate(instructions) if line.startswith("FROM "))
    for line in instructions[start + 1 :]:
        word, _, rest = line.partition(" ")
        yield word, rest.strip()

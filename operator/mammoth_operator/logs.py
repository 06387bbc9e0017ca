"""Translate: log records to one line each, JSON for machines or text for people."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

__all__ = ["configure"]

PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
QUIET = ("kopf", "aiohttp", "urllib3", "asyncio")


class _Lines(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        extra = {key: value for key, value in record.__dict__.items() if key not in PLAIN and not key.startswith("k8s_") and key != "settings"}  # fmt: skip
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if record.exc_info:
            extra["traceback"] = self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps({"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(), **extra}, default=str)  # fmt: skip
        return f"{time} {record.levelname:7} {record.getMessage()} " + " ".join(f"{key}={value}" for key, value in extra.items())  # fmt: skip


def configure(level: str, log_format: str) -> None:
    """Send records of at least `level` to stderr; libraries speak from warnings upwards."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(as_json=log_format == "json"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))

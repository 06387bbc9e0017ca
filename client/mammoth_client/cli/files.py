"""Do: own the files and folders that a person names: refuse what cannot be written before any work is done, then write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mammoth_wire.errors import InvalidRequest

__all__ = ["STDOUT", "check", "made_folder", "save"]

STDOUT = Path("-")
STDOUT_DESCRIPTOR = 1


def check(path: Path) -> None:
    """Raise InvalidRequest when a file could not be written to `path`; leave everything as it is."""
    if path == STDOUT:
        return
    if not path.parent.is_dir():
        raise InvalidRequest([("output", f"there is no folder {path.parent}")])
    real = Path(os.path.realpath(path))
    with _refusing("output", f"cannot write {path}"):
        is_new = not real.exists()
        if is_new or real.is_file() or real.is_dir():  # the reader of a pipe would take the closing for the end
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT, 0o666))
        if is_new:
            real.unlink()


def save(path: Path, data: bytes) -> None:
    """Write a file, or standard output for STDOUT. Raises InvalidRequest when that fails."""
    with _refusing("output", f"cannot write {'to standard output' if path == STDOUT else path}"):
        if path != STDOUT:
            path.write_bytes(data)
            return
        with open(STDOUT_DESCRIPTOR, "wb", closefd=False) as stdout:
            stdout.write(data)


def made_folder(path: Path, *, field: str) -> Path:
    """Make a folder, and those above it, unless it is there. Raises InvalidRequest when files cannot be put into it."""
    with _refusing(field, f"cannot write into {path}"):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


@contextmanager
def _refusing(field: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise InvalidRequest([(field, f"{what}: {err.strerror}")]) from err

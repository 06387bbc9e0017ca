"""Do: what is built once a machine, outside the checkout, and how two sessions that want it at once share the work."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_folder", "digest_of", "making"]

KEPT_S = 14 * 86400


def cache_folder() -> Path:
    """Return `${XDG_CACHE_HOME:-~/.cache}/mammoth`, made if needed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "mammoth"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest_of(parts: Iterable[str | Path]) -> str:
    """Return 12 hexadecimal digits that change when a text, or the name or content of a file, changes."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(f"{part.name if isinstance(part, Path) else ''}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:12]


@contextmanager
def making(name: str) -> Iterator[Path | None]:
    """Yield an empty folder to fill, which becomes `name` of the cache when the block ends well; None: it is there.

    A second process waits for the first. Folders of the same kind (the part of `name` before its last dash) that nobody
    has asked for in two weeks are removed: they can be built again.
    """
    final = cache_folder() / name
    with (cache_folder() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.exists():
            os.utime(final)
            yield None
            return
        folder = Path(tempfile.mkdtemp(prefix=".making-", dir=cache_folder()))
        try:
            yield folder
            folder.chmod(0o755)
            folder.rename(final)
            _forget(f"{name.rpartition('-')[0]}-*")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _forget(pattern: str) -> None:
    for folder in cache_folder().glob(pattern):
        if time.time() - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder)

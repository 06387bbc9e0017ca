"""Decide where a client connects and what it sends along: a frozen value, from arguments or from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mammoth_client._core import RetryPolicy, checked_timeout_s
from mammoth_wire.errors import InvalidRequest

__all__ = ["DEFAULT_ADDRESS", "DEFAULT_TIMEOUT_S", "Settings"]

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One server and how to talk to it. `token_file` is read before every call, so a rotated token is picked up."""

    address: str = DEFAULT_ADDRESS
    timeout_s: float = DEFAULT_TIMEOUT_S
    token_file: Path | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        checked_timeout_s(self.timeout_s)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read MAMMOTH_ADDRESS, MAMMOTH_TIMEOUT_S and MAMMOTH_TOKEN_FILE; empty counts as absent.

        Raises InvalidRequest naming the variable when a value cannot be used.
        """
        token_file = environ.get("MAMMOTH_TOKEN_FILE")
        return cls(
            address=environ.get("MAMMOTH_ADDRESS") or DEFAULT_ADDRESS,
            timeout_s=checked_timeout_s(
                environ.get("MAMMOTH_TIMEOUT_S") or DEFAULT_TIMEOUT_S, field="MAMMOTH_TIMEOUT_S"
            ),
            token_file=Path(token_file) if token_file else None,
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call: the bearer token when there is a token file.

        Raises InvalidRequest when the file cannot be read or does not hold one line of printable ASCII.
        """
        if self.token_file is None:
            return ()
        try:
            token = self.token_file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as err:
            raise InvalidRequest([("token_file", f"cannot read {self.token_file}: {err}")]) from err
        if not token or not token.isprintable():
            raise InvalidRequest([("token_file", f"{self.token_file} does not hold one line of printable characters")])
        return (("authorization", f"Bearer {token}"),)

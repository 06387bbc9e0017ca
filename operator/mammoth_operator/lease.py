"""Do: own the lease: who may write. It is checked, without a request, before every write.

A holder trusts its lease for much less time than others wait before they take it, so that a write that is still on its way
when the holder is cut off lands before anybody else begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from mammoth_operator.cluster import Cluster
from mammoth_operator.errors import ApiError, NotLeader

__all__ = ["Lease"]

RETRY_S = 2.0

logger = logging.getLogger(__name__)


class Lease:
    """A coordination Lease. `duration_s` is how long it lives unrenewed; it is renewed after 30 % of that and trusted for 40 %."""

    def __init__(self, namespace: str, name: str, holder: str, *, duration_s: float) -> None:
        self._namespace, self._name, self._holder, self._duration_s = namespace, name, holder, duration_s
        self._renewed = -float("inf")
        self._looked = time.monotonic()
        self._held = asyncio.Event()
        self._mine: dict[str, Any] | None = None
        self._seen: tuple[str, float] = (
            "",
            0.0,
        )  # the resource version of somebody else's lease, and since when it stands

    @property
    def renewed_ago_s(self) -> float:
        return time.monotonic() - self._renewed

    @property
    def looked_ago_s(self) -> float:
        """Return how long ago the API server last answered about the lease."""
        return time.monotonic() - self._looked

    @property
    def is_held(self) -> bool:
        return self.renewed_ago_s < 0.4 * self._duration_s

    def check(self) -> None:
        """Raise NotLeader unless this process may write now."""
        if not self.is_held:
            raise NotLeader(
                f"standby: {self._namespace}/{self._name} is not held by {self._holder}", retry_after_s=RETRY_S
            )

    async def held(self) -> None:
        """Wait until the lease is held for the first time."""
        await self._held.wait()

    async def run(self, cluster: Cluster) -> None:
        """Acquire and renew until cancelled; give the lease back at the end, so that a successor need not wait."""
        try:
            while True:
                try:
                    held = await self._step(cluster)
                    self._looked = time.monotonic()
                except ApiError as err:
                    logger.warning("cannot renew the lease", extra={"error": str(err)})
                    held = False
                await asyncio.sleep(0.3 * self._duration_s if held else min(RETRY_S, self._duration_s / 5))
        finally:
            if self.is_held:
                await self._release(cluster)

    async def _step(self, cluster: Cluster) -> bool:
        """Renew or take the lease; return whether it is held."""
        start = time.monotonic()
        found = self._mine or await cluster.get("Lease", self._namespace, self._name)
        self._mine = None
        if found is not None and not self._is_free(found):
            if self.is_held:
                logger.error("the lease was taken", extra={"holder": found["spec"].get("holderIdentity")})
            self._renewed = -float("inf")
            return False
        self._mine = await cluster.put_unfenced(self._manifest(found, self._holder), new=found is None)
        self._renewed = start
        if not self._held.is_set():
            logger.info("holding the lease", extra={"lease": f"{self._namespace}/{self._name}", "holder": self._holder})
            self._held.set()
        return True

    def _is_free(self, found: dict[str, Any]) -> bool:
        """Return whether it is ours, nobody's, or has stood unrenewed for its duration by our own clock."""
        spec, version = found.get("spec") or {}, found["metadata"]["resourceVersion"]
        if spec.get("holderIdentity") in (None, "", self._holder):
            return True
        if self._seen[0] != version:
            self._seen = (version, time.monotonic())
        return time.monotonic() - self._seen[1] > float(spec.get("leaseDurationSeconds") or self._duration_s)

    def _manifest(self, found: dict[str, Any] | None, holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = dict((found or {}).get("spec") or {})
        changed = spec.get("holderIdentity") != holder
        spec |= {"holderIdentity": holder, "renewTime": now, "leaseDurationSeconds": max(round(self._duration_s), 1)}
        if changed:
            spec |= {"acquireTime": now, "leaseTransitions": spec.get("leaseTransitions", 0) + 1}
        metadata = found["metadata"] if found else {"name": self._name, "namespace": self._namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    async def _release(self, cluster: Cluster) -> None:
        self._renewed = -float("inf")
        try:
            found = await cluster.get("Lease", self._namespace, self._name)
            if found and found["spec"].get("holderIdentity") == self._holder:
                await cluster.put_unfenced(self._manifest(found, ""), new=False)
        except ApiError as err:
            logger.warning("cannot give the lease back", extra={"error": str(err)})

"""Do: put the operator together and run it: watches feed the index and the queue, the queue reconciles, the lease guards."""

from __future__ import annotations

import asyncio
import logging
import time

import kopf

from mammoth_operator.cluster import Cluster, connect
from mammoth_operator.control import Control
from mammoth_operator.errors import ApiError, NotLeader
from mammoth_operator.handlers import OPTIONAL, WATCHED, register, settings_for
from mammoth_operator.health import Checks, Pulse, serve
from mammoth_operator.index import Index
from mammoth_operator.lease import Lease
from mammoth_operator.manifests import Options
from mammoth_operator.metrics import Metrics
from mammoth_operator.names import Key
from mammoth_operator.queue import Queue
from mammoth_operator.reconcile import Reconciler
from mammoth_operator.settings import OperatorSettings
from mammoth_operator.tuning.samples import Sample
from mammoth_operator.tuning.slo import promises_of, result_of
from mammoth_operator.watching import SWEEP_AFTER_S, Watches, session

__all__ = ["Operator"]

logger = logging.getLogger(__name__)


class Operator:
    """Owns the parts and how they know each other."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self.metrics, self.index, self.control, self.pulse = Metrics(), Index(), Control(), Pulse()
        self.client = connect()
        self.lease = Lease(
            settings.namespace, settings.lease_name, settings.identity, duration_s=settings.lease_seconds
        )
        self.cluster = Cluster(self.client, fence=self.lease.check, timed=self.metrics.timed)
        self.watches = Watches(
            {plural: kind for plural, (_, _, kind) in {**WATCHED, **OPTIONAL}.items()},
            frozenset(kind for _, _, kind in WATCHED.values()),
            noted=lambda kind: self.metrics.last_event.labels(kind).set(time.time()),
            relisted=self._relisted,
        )
        self.queue: Queue[Key] = Queue(self._reconcile)
        self._reconciler: Reconciler | None = None

    async def run(self) -> None:
        """Serve until a signal. A task that fails ends everything; the lease is given back in any case."""
        web = await serve(self._checks(), self._settings.host, self._settings.port)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._reconciler = Reconciler(
                    self.cluster, self.control, self.index,
                    Options(self._settings.network_policies, self._settings.namespace),
                    spawn=tasks.create_task, wake=self.queue.add, drifted=self.metrics.corrections.inc,
                    on_picture=self._count_picture, on_tuned=lambda action: self.metrics.decisions.labels(action).inc(),
                )  # fmt: skip
                helpers = [
                    tasks.create_task(self.pulse.run(), name="pulse"),
                    tasks.create_task(self.lease.run(self.cluster), name="lease"),
                    tasks.create_task(self._work(), name="queue"),
                ]
                await self._watch()
                logger.info("stopping")
                for task in helpers:
                    task.cancel()
        finally:
            await self.control.close()
            await web.cleanup()
            self.cluster.close()

    def _checks(self) -> Checks:
        return Checks(
            lag_s=lambda: self.pulse.lag_s,
            lease_s=lambda: self.lease.looked_ago_s,
            lease_limit_s=self._settings.lease_seconds,
            silent_s=self.watches.silent_s,
            overdue_s=self.queue.oldest_s,
            metrics=lambda: self.metrics.text(
                (parent.status.get("phase", "") for parent in self.index.parents), depth=len(self.queue)
            ),
        )

    async def _work(self) -> None:
        """Reconcile once everything was seen and the lease is held."""
        await self.watches.settled()
        await self.lease.held()
        logger.info("reconciling", extra={"keys": len(self.queue)})
        await self.queue.run()

    async def _watch(self) -> None:
        """Watch until SIGTERM or SIGINT, which kopf takes."""
        registry = kopf.OperatorRegistry()
        register(registry, self.index.see, self.queue.add, self.watches, lambda: session(self.client.configuration, self.watches))  # fmt: skip
        await kopf.operator(
            registry=registry,
            settings=settings_for(namespaced=bool(self._settings.namespaces)),
            namespaces=self._settings.namespaces,
            clusterwide=not self._settings.namespaces,
            standalone=True,
        )

    async def _reconcile(self, key: Key) -> float | None:
        assert self._reconciler is not None
        try:
            with self.metrics.reconcile_seconds.time():
                again_s = await self._reconciler.run(key)
        except ApiError as err:
            self.metrics.reconciles.labels("standby" if isinstance(err, NotLeader) else "failed").inc()
            self.metrics.errors.labels(type(err).__name__).inc()
            raise
        self.metrics.reconciles.labels("done").inc()
        return again_s

    def _count_picture(self, key: Key, sample: Sample) -> None:
        parent = self.index.parent(key)
        result = result_of(sample, promises_of(parent.spec)) if parent else None
        if result is not None:
            self.metrics.promises.labels(key.namespace, key.name, *result).inc()

    def _relisted(self, kind: str) -> None:
        """Forget, a little later, what the new list of `kind` did not show."""
        self.index.relisted(kind)
        asyncio.get_running_loop().call_later(SWEEP_AFTER_S, self._sweep, kind)

    def _sweep(self, kind: str) -> None:
        for key in self.index.sweep(kind):
            self.queue.add(key)

"""Translate: what kopf's watches show, to the index and the queue. The only module that uses kopf's decorators.

Low-level event handlers alone: kopf writes nothing to users' objects, no progress, no annotation, no finalizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from mammoth_operator.names import DEPLOYMENT_LABEL, GROUP, KIND, PLURAL, VERSION, Key
from mammoth_operator.watching import Watches

__all__ = ["OPTIONAL", "WATCHED", "register", "settings_for"]

PREFIX = f"operator.{GROUP}"
# plural: (group, version, kind)
WATCHED = {
    PLURAL: (GROUP, VERSION, KIND),
    "configmaps": ("", "v1", "ConfigMap"),
    "controllerrevisions": ("apps", "v1", "ControllerRevision"),
    "deployments": ("apps", "v1", "Deployment"),
    "networkpolicies": ("networking.k8s.io", "v1", "NetworkPolicy"),
    "poddisruptionbudgets": ("policy", "v1", "PodDisruptionBudget"),
    "pods": ("", "v1", "Pod"),
    "serviceaccounts": ("", "v1", "ServiceAccount"),
    "services": ("", "v1", "Service"),
}
OPTIONAL = {
    "podmonitors": ("monitoring.coreos.com", "v1", "PodMonitor"),
    "servicemonitors": ("monitoring.coreos.com", "v1", "ServiceMonitor"),
}


def register(
    registry: kopf.OperatorRegistry,
    see: Callable[..., Key | None],
    wake: Callable[[Key], None],
    watches: Watches,
    login: Callable[[], kopf.AiohttpSession],
) -> None:
    """Bind the handlers to `registry`; importing this module binds nothing."""

    async def seen(event: Mapping[str, Any], **_: Any) -> None:
        watches.event()
        key = see(event["object"], gone=event["type"] == "DELETED")
        if key is not None:
            wake(key)

    for plural, (group, version, kind) in {**WATCHED, **OPTIONAL}.items():
        kopf.on.event(group, version, plural, id=f"see-{kind.lower()}", registry=registry)(seen)

    @kopf.on.login(id="login", registry=registry)
    async def logged_in(**_: Any) -> kopf.AiohttpSession:
        return login()


def settings_for(*, namespaced: bool) -> kopf.OperatorSettings:
    """Return the settings that the platform asks of kopf: bounded watches, nothing posted by itself, our own names."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = f"{PREFIX}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=PREFIX)
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 70
    settings.watching.reconnect_backoff = 1
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.posting.level = 30
    settings.posting.loggers = False
    settings.posting.reporting_component = "mammoth-operator"
    settings.peering.standalone = True  # the lease is the fence
    settings.execution.default_backoff = 15
    settings.queueing.worker_limit = None
    settings.scanning.disabled = namespaced
    for plural, (group, version, kind) in {**WATCHED, **OPTIONAL}.items():
        if kind != KIND:
            settings.watching.label_selectors[group, version, plural] = DEPLOYMENT_LABEL
    return settings

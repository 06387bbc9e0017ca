"""Do: own what the watches have shown: parents, and a slim record of each child. Everything is lost and relearned on a restart.

Records are kept by version, so that a late watch event never undoes what our own write has already answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mammoth_operator.names import DEPLOYMENT_LABEL, KIND, Key
from mammoth_operator.observed import Child, Parent, child_of, parent_of

__all__ = ["Index"]

ChildId = tuple[str, str]  # kind, name


class Index:
    """Parents by key, children by parent and identity."""

    def __init__(self) -> None:
        self._parents: dict[Key, Parent] = {}
        self._children: dict[Key, dict[ChildId, Child]] = {}
        self._unseen: dict[str, set[tuple[Key, str]]] = {}

    @property
    def parents(self) -> Iterable[Parent]:
        return self._parents.values()

    def parent(self, key: Key) -> Parent | None:
        return self._parents.get(key)

    def children(self, key: Key) -> Mapping[ChildId, Child]:
        return dict(self._children.get(key, {}))

    def see(self, raw: Mapping[str, Any], *, gone: bool = False) -> Key | None:
        """Take in one object as a watch, or an answer to a write, shows it. Return whose reconcile it calls for, if any."""
        if raw["kind"] == KIND:
            return self._see_parent(parent_of(raw), gone)
        if DEPLOYMENT_LABEL not in raw["metadata"].get("labels", {}):
            return None
        return self._see_child(child_of(raw), gone)

    def _see_parent(self, parent: Parent, gone: bool) -> Key | None:
        self._unseen.get(KIND, set()).discard((parent.key, parent.key.name))
        known = self._parents.get(parent.key)
        if known and known.version > parent.version:
            return None
        if gone:
            self._parents.pop(parent.key, None)
            return parent.key
        self._parents[parent.key] = parent
        return None if known and known.same_intent(parent) else parent.key

    def _see_child(self, child: Child, gone: bool) -> Key | None:
        key, identity = child.parent, (child.kind, child.name)
        self._unseen.get(child.kind, set()).discard((key, child.name))
        siblings = self._children.setdefault(key, {})
        known = siblings.get(identity)
        if known and known.version > child.version:
            return None
        if gone:
            siblings.pop(identity, None)
            if not siblings:
                del self._children[key]
            return key
        siblings[identity] = child
        return key if known is None or _facts(known) != _facts(child) else None

    def relisted(self, kind: str) -> None:
        """Note that `kind` is being listed anew: what the list does not show again is gone."""
        if kind == KIND:
            self._unseen[kind] = {(key, key.name) for key in self._parents}
        else:
            self._unseen[kind] = {
                (key, name) for key, siblings in self._children.items() for child_kind, name in siblings if child_kind == kind
            }  # fmt: skip

    def sweep(self, kind: str) -> set[Key]:
        """Forget what the last list of `kind` did not show, and return whose reconcile that calls for."""
        missing = self._unseen.pop(kind, set())
        for key, name in missing:
            if kind == KIND:
                self._parents.pop(key, None)
            else:
                self._children.get(key, {}).pop((kind, name), None)
        return {key for key, _ in missing}


def _facts(child: Child) -> tuple[Any, ...]:
    """Return what of a child can call for a reconcile: all but its version."""
    return tuple(getattr(child, name) for name in Child.__slots__ if name != "version")

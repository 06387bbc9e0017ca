"""The two ways in which a cluster may not come: the machine cannot carry one (tests skip), or one broke (tests fail)."""

from __future__ import annotations

__all__ = ["ClusterError", "Unavailable"]


class Unavailable(Exception):
    """This machine cannot do it; the text says what is missing."""


class ClusterError(Exception):
    """It should have worked; the text says what broke, with the last lines of the log."""

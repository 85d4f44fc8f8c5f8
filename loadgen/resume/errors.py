"""What keeps one sample from being taken."""

from __future__ import annotations

from loadgen.errors import LoadgenError


class NotAsMeant(LoadgenError):
    """The server did something else than was to be measured. The text says what."""


class OffloadFailed(LoadgenError):
    """The hand-written offload ended or could not do what it was asked. The text says why."""

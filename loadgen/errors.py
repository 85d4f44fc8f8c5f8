"""What stops a run before it starts."""

from __future__ import annotations


class LoadgenError(Exception):
    """The run cannot start: a bad option, a bad trace, or a target that does not answer. The text says which."""

"""Servers that are started for an experiment with exported sessions: their KV arrives on a disk."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loadgen.peers.serving import ManagedTarget
from loadgen.targets.access import Access


@contextmanager
def with_disk(targets: Sequence[Access]) -> Iterator[list[Access]]:
    """The targets, of which those that will be started have a folder for KV files; it is gone at the end of the block.

    A server without one takes only the tokens of an imported session, and computes its KV again.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-state-") as folder:
        yield [
            replace(target, settings=replace(target.settings, state=Path(folder) / f"state-{number}"))
            if isinstance(target, ManagedTarget)
            else target
            for number, target in enumerate(targets)
        ]

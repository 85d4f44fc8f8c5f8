"""Where the replicas and the directory of one cluster run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from app.cluster.directory import Directory
from app.cluster.keeper import Keeper, ReplicaSpec
from app.cluster.table import Table
from app.domain.errors import DjinnError


class NeverStarted(DjinnError):
    """A replica cannot start with these settings."""


class Host(Protocol):
    """Runs replicas. Used on one event loop."""

    @property
    def directory(self) -> Directory:
        """The cluster's directory."""
        ...

    @property
    def size(self) -> int:
        """How many replicas there are."""
        ...

    async def start(self) -> None:
        """Begin to start everything."""
        ...

    async def urls(self) -> dict[str, str]:
        """The replicas that listen now, by name. Raises `NeverStarted` if one can never."""
        ...

    def reload(self) -> None:
        """Have all replicas read their files again."""
        ...

    async def stop(self) -> None:
        """Drain all replicas; returns when they have ended."""
        ...

    def kill(self) -> None:
        """End everything at once."""
        ...


class LocalHost:
    """Replicas as children of this process, the directory in it: one machine without Ray."""

    def __init__(self, specs: Sequence[ReplicaSpec], folder: Path | None) -> None:
        """`folder` has the directory's file; None: it is in memory. Raises `DirectoryAway`."""
        self._keepers = [Keeper(spec) for spec in specs]
        self._table = Table(folder)

    @property
    def directory(self) -> Directory:
        """The cluster's directory."""
        return self._table

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return len(self._keepers)

    async def start(self) -> None:
        """Begin to start the replicas."""
        for keeper in self._keepers:
            keeper.start()

    async def urls(self) -> dict[str, str]:
        """The replicas that listen now. Raises `NeverStarted`."""
        for keeper in self._keepers:
            if keeper.failure is not None:
                raise NeverStarted(keeper.failure)
        return {keeper.spec.name: keeper.url for keeper in self._keepers if keeper.url is not None}

    def reload(self) -> None:
        """Have the replicas read their files again."""
        for keeper in self._keepers:
            keeper.reload()

    async def stop(self) -> None:
        """Drain the replicas."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))
        self._table.close()

    def kill(self) -> None:
        """End the replicas at once."""
        for keeper in self._keepers:
            keeper.kill()

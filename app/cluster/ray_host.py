"""Replicas and the directory as actors of Ray, on one machine or many. Bytes of clients never pass through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from app.cluster.directory import Directory
from app.cluster.hosts import NeverStarted
from app.cluster.keeper import Keeper, ReplicaSpec
from app.cluster.table import Table
from app.domain.errors import DirectoryAway

PATIENCE_S = 2.0
"""How long the directory may take."""
THREADS, GPUS = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"
FAILED = "failed: "
"""What an actor says in place of a URL if its replica can never start."""


class ReplicaActor:
    """Owns one `djinn serve`. Ray starts the actor again where it ends, and that the replica, from its own folder."""

    def __init__(self, spec: ReplicaSpec, *, is_alone: bool, threads: str | None, gpus: float) -> None:
        """`is_alone`: all replicas are on this machine, and listen on loopback. `threads`: what the user has set of
        `OMP_NUM_THREADS`. `gpus`: what Ray gives the actor.
        """
        # Ray gives an actor without CPUs one thread, and one without GPUs none. A replica takes what the machine has.
        os.environ.pop(THREADS, None)
        if threads is not None:
            os.environ[THREADS] = threads
        if not gpus and not os.environ.get(GPUS):
            os.environ.pop(GPUS, None)
        host = spec.host if is_alone else socket.gethostbyname(socket.gethostname())
        self._keeper = Keeper(replace(spec, host=host))
        self._has_begun = False

    async def url(self) -> str | None:
        """Where the replica listens; None while it does not."""
        if not self._has_begun:  # a constructor has no event loop
            self._has_begun = True
            self._keeper.start()
        return self._keeper.url if self._keeper.failure is None else f"{FAILED}{self._keeper.failure}"

    async def reload(self) -> None:
        """Have the replica read its files again."""
        self._keeper.reload()

    async def stop(self) -> None:
        """Drain the replica."""
        await self._keeper.stop()


class DirectoryActor:
    """The directory's table. One that is started again has what was journaled."""

    def __init__(self, folder: Path | None) -> None:
        self._table = Table(folder)

    async def find(self, key: str) -> str | None:
        """See `Directory.find`."""
        return await self._table.find(key)

    async def bind(self, key: str, replica: str) -> str:
        """See `Directory.bind`."""
        return await self._table.bind(key, replica)

    async def put(self, key: str, replica: str) -> None:
        """See `Directory.put`."""
        await self._table.put(key, replica)


class RayDirectory:
    """The directory as the front door sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def find(self, key: str) -> str | None:
        """See `Directory.find`."""
        found: str | None = await _answered(self._actor.find.remote(key))
        return found

    async def bind(self, key: str, replica: str) -> str:
        """See `Directory.bind`."""
        found: str = await _answered(self._actor.bind.remote(key, replica))
        return found

    async def put(self, key: str, replica: str) -> None:
        """See `Directory.put`."""
        await _answered(self._actor.put.remote(key, replica))


async def _answered(reference: Any) -> Any:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reference
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise DirectoryAway(f"the directory does not answer: {error or 'no answer in time'}") from error


class RayHost:
    """A cluster of Ray actors."""

    def __init__(self, specs: Sequence[ReplicaSpec], folder: Path | None, address: str | None, gpus: float) -> None:
        """Connect to Ray at `address`, or start it on this machine if that is None. Each replica has `gpus` of Ray's.

        `folder` has the directory's file. Raises `NeverStarted` if Ray does not start, or is not there.
        """
        try:
            ray.init(address=address, include_dashboard=False, configure_logging=False)
        except Exception as error:  # Ray raises no other for a start that takes too long
            raise NeverStarted(f"Ray cannot be had: {error}") from error
        is_alone = address is None
        lasting = {"max_restarts": -1, "num_cpus": 0}
        made = ray.remote(ReplicaActor)
        self._replicas = {
            spec.name: made.options(**lasting, num_gpus=gpus).remote(
                spec, is_alone=is_alone, threads=os.environ.get(THREADS), gpus=gpus
            )
            for spec in specs
        }
        self._directory = ray.remote(DirectoryActor).options(**lasting).remote(folder)

    @property
    def directory(self) -> Directory:
        """The cluster's directory."""
        return RayDirectory(self._directory)

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return len(self._replicas)

    async def start(self) -> None:
        """Begin to start the replicas."""
        await self.urls()

    async def urls(self) -> dict[str, str]:
        """The replicas that listen now. Raises `NeverStarted`."""
        asked = [self._url(actor) for actor in self._replicas.values()]
        found = dict(zip(self._replicas, await asyncio.gather(*asked), strict=True))
        for url in found.values():
            if url is not None and url.startswith(FAILED):
                raise NeverStarted(url.removeprefix(FAILED))
        return {name: url for name, url in found.items() if url is not None}

    def reload(self) -> None:
        """Have the replicas read their files again."""
        for actor in self._replicas.values():
            actor.reload.remote()

    async def stop(self) -> None:
        """Drain the replicas, then let go of Ray."""
        with contextlib.suppress(ray.exceptions.RayError):
            await asyncio.gather(*(actor.stop.remote() for actor in self._replicas.values()))
        self.kill()

    def kill(self) -> None:
        """End everything at once."""
        ray.shutdown()

    async def _url(self, actor: Any) -> str | None:
        """None also for an actor that does not answer: Ray starts it again."""
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(PATIENCE_S):
                url: str | None = await actor.url.remote()
                return url
        return None

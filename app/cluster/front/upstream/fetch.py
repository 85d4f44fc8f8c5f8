"""Small answers that the front door itself asks replicas for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from app.cluster.fleet import Replica
from app.cluster.front.heads import Headers
from app.cluster.front.upstream.connection import Lost
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaAway

LARGEST = 64 << 20
"""Bytes of an answer."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One replica's whole answer."""

    replica: Replica
    status: int
    headers: Headers
    content: bytes


async def fetch(pool: Pool, replica: Replica, target: bytes, headers: Headers, patience_s: float) -> Fetched:
    """What the replica answers to GET. Raises `ReplicaAway`, also if the answer takes longer than `patience_s`."""
    upstream = await pool.take(replica)
    try:
        async with asyncio.timeout(patience_s):
            upstream.send_head(b"GET", target, headers)
            await upstream.end_request()
            head = await upstream.answer()
            content = bytearray()
            async for part in upstream.body():
                content += part
                if len(content) > LARGEST:
                    raise Lost("its answer is too large", is_begun=True)
            return Fetched(replica, head.status_code, list(head.headers), bytes(content))
    except (Lost, TimeoutError) as error:
        upstream.close()
        reason = str(error) or "no answer in time"
        raise ReplicaAway(f"replica {replica.name} does not answer ({reason}): try again") from error
    finally:
        pool.give(replica, upstream)


async def fetch_all(
    pool: Pool, replicas: Iterable[Replica], target: bytes, headers: Headers, patience_s: float
) -> list[Fetched]:
    """What all of them answer. Raises `ReplicaAway` if one does not."""
    asked = [asyncio.create_task(fetch(pool, each, target, headers, patience_s)) for each in replicas]
    try:
        return list(await asyncio.gather(*asked))
    finally:
        for each in asked:
            each.cancel()

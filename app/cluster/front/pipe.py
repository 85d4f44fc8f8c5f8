"""One request on its way to a replica, and the answer on its way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import h11
from starlette.types import Scope, Send

from app.cluster.fleet import Replica
from app.cluster.front.body import Body, Gone
from app.cluster.front.heads import CLIENT, Headers, end_to_end, forwarded, target_bytes
from app.cluster.front.protocol import FrontProtocol
from app.cluster.front.upstream.connection import Lost, Upstream
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaLost

REPEATABLE = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that do no harm if they are done twice."""
NOT_PASSED = frozenset({b"date", b"server"})
"""Headers that each of the client's answers has already."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a replica's answer, and the connection that the rest comes on."""

    head: h11.Response
    upstream: Upstream

    @property
    def is_chunked(self) -> bool:
        """Whether the rest comes in chunks."""
        return any(name == b"transfer-encoding" for name, _ in self.head.headers)


class Pipe:
    """Sends one client's request to replicas. Used by one request."""

    def __init__(self, scope: Scope, body: Body, pool: Pool) -> None:
        self._scope = scope
        self._body = body
        self._pool = pool

    @contextlib.asynccontextmanager
    async def asking(self, replica: Replica) -> AsyncIterator[Answer]:
        """The replica's answer, within the block. The replica is told if the client goes away meanwhile.

        Raises `Gone`, `ReplicaAway` and `ReplicaLost`.
        """
        upstream = await self._pool.take(replica)
        sending = asyncio.create_task(self._send(upstream, replica))
        try:
            try:
                head = await upstream.answer()
            except Lost as lost:
                if not (upstream.is_reused and not lost.is_begun and self._may_repeat):
                    raise
                # The replica closed the connection as the request came.
                await _end(sending)
                upstream = await self._pool.take(replica, fresh=True)
                sending = asyncio.create_task(self._send(upstream, replica))
                head = await upstream.answer()
            yield Answer(head, upstream)
        except Lost as lost:
            if self._body.is_gone or self._body.refusal is not None:
                raise Gone from lost
            message = f"replica {replica.name} went away before its answer was there: {lost}"
            raise ReplicaLost(f"{message}; whether the request was done is not known") from lost
        finally:
            try:
                await _end(sending)
            finally:
                self._pool.give(replica, upstream)

    async def pass_answer(self, answer: Answer, send: Send) -> None:
        """Send the replica's answer to the client. If it ends early, so does the client's connection."""
        client: FrontProtocol = self._scope["state"][CLIENT]
        status = answer.head.status_code
        await send({"type": "http.response.start", "status": status, "headers": passed_headers(answer)})
        try:
            if answer.is_chunked and client.takes_chunks:
                client.on_writable = answer.upstream.go_on
                await answer.upstream.pass_chunks(client)
            else:
                async for part in answer.upstream.body():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except Lost:
            client.cut()
            return
        finally:
            client.on_writable = None
        await send({"type": "http.response.body", "body": b""})

    @property
    def _may_repeat(self) -> bool:
        return self._scope["method"] in REPEATABLE and self._body.can_repeat and not self._body.is_gone

    async def _send(self, upstream: Upstream, replica: Replica) -> None:
        """Send the request; then end its connection if the client goes away before the answer is over."""
        headers = forwarded(self._scope, f"{replica.host}:{replica.port}")
        try:
            upstream.send_head(self._scope["method"].encode(), target_bytes(self._scope), headers)
            async for part in self._body.parts():
                await upstream.send_body(part)
            await upstream.end_request()
            await self._body.watch()
        except (Gone, h11.LocalProtocolError):
            upstream.close()
        except Lost:
            pass  # the waiting request gets the error


def passed_headers(answer: Answer) -> Headers:
    """Those that the client gets."""
    return [(name, value) for name, value in end_to_end(answer.head.headers) if name not in NOT_PASSED]


async def _end(task: asyncio.Task[None]) -> None:
    """End a task, and raise what it has failed with."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error

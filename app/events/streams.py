"""The open event streams: counted against limits, fed with memory, and what each one sends."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import Context

from prometheus_client import Gauge

from app.domain.errors import EngineAway, EngineError, StreamLimit
from app.domain.values import KVPolicy, SessionState
from app.events.channel import Channel
from app.events.feed import Feed, Scope
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.web.sse import sse_event
from app.wire.live import SnapshotView
from app.wire.memory import MemoryView
from app.wire.sessions import SessionView

logger = logging.getLogger(__name__)

OF_TENANT, OF_ALL = 32, 256
"""Most streams of one tenant, and of all together."""
RETRY_AFTER_S = 10
MEMORY_INTERVAL_S = 1.0
LINGER_S = 60.0
"""For how long a channel without readers stays, so that they can come back to it."""
SNAPSHOT_PART = 100
"""Sessions in one event."""


class EventStreams:
    """Every event stream of one server. Used on the event loop only."""

    def __init__(self, feed: Feed, registry: SessionRegistry, policy: KVPolicy, gauge: Gauge) -> None:
        self._feed = feed
        self._registry = registry
        self._policy = policy
        self._gauge = gauge
        self._count = 0
        self._telling: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def reading(self, scope: Scope) -> Iterator[Channel]:
        """Count one more reader. Raises `StreamLimit`, and `Draining` during shutdown."""
        self._registry.table.require_no_drain()
        self._check_limits(scope)
        channel = self._feed.channels.setdefault(scope, Channel())
        self._count += 1
        channel.readers += 1
        if channel.lingers is not None:
            channel.lingers.cancel()
            channel.lingers = None
        self._gauge.inc()
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell_memory(), context=Context())  # of no request
        try:
            yield channel
        finally:
            self._count -= 1
            channel.readers -= 1
            self._gauge.dec()
            self._let_go(scope, channel)

    async def events(
        self, scope: Scope, channel: Channel, last_event_id: str | None, may_read: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """What happens from now on, or from that event on, until the server shuts down or the caller may not read it
        any more.
        """
        position = channel.find(last_event_id)
        while may_read():
            found = None if position is None else channel.after(position)
            if found is None:
                position = channel.position
                async with contextlib.aclosing(self._snapshot(scope, channel.id_of(position))) as parts:
                    async for part in parts:
                        yield part
            elif found[0] > (position or 0):
                position, events = found
                if events:
                    yield events
            elif self._feed.has_ended:
                return
            else:
                await channel.news()

    async def _snapshot(self, scope: Scope, event_id: str) -> AsyncGenerator[bytes, None]:
        """Every session that is told of. Only the last part has the id: a reader with that id has all parts."""
        sessions = [session for session in self._registry.table if scope.sees(session)]
        for first in range(0, len(sessions) or 1, SNAPSHOT_PART):
            has_more = first + SNAPSHOT_PART < len(sessions)
            views = [_view(scope, each) for each in sessions[first : first + SNAPSHOT_PART] if _is_open(each)]
            data = SnapshotView(time=time.time(), sessions=views, has_more=has_more).model_dump_json().encode()
            yield sse_event("snapshot", data, None if has_more else event_id)
            await asyncio.sleep(0)  # turns go on between two parts

    def _check_limits(self, scope: Scope) -> None:
        channel = self._feed.channels.get(scope)
        if channel is not None and channel.readers >= OF_TENANT:
            message = f"{OF_TENANT} event streams of this tenant are open, and no more may be"
            raise StreamLimit(message, retry_after_s=RETRY_AFTER_S)
        if self._count >= OF_ALL:
            message = f"{OF_ALL} event streams are open, and no more may be"
            raise StreamLimit(message, retry_after_s=RETRY_AFTER_S)

    def _let_go(self, scope: Scope, channel: Channel) -> None:
        """Drop a channel without readers, but not at once."""
        if not self._count and self._telling is not None:
            self._telling.cancel()
            self._telling = None

        def drop() -> None:
            if self._feed.channels.get(scope) is channel:
                del self._feed.channels[scope]

        if not channel.readers:
            channel.lingers = asyncio.get_running_loop().call_later(LINGER_S, drop)

    async def _tell_memory(self) -> None:
        """Tell of memory, and have every stream ask whether it may go on, for as long as there are any."""
        while True:
            try:
                await self._publish_memory()
            except (EngineError, EngineAway):
                pass  # another second tells
            except Exception:
                logger.exception("the live stream could not tell of memory; it tries again")
            for _, channel in self._read():
                channel.wake()
            await asyncio.sleep(MEMORY_INTERVAL_S)

    async def _publish_memory(self) -> None:
        memory = await self._registry.memory()
        sessions = self._registry.table.by_owner()
        for scope, channel in self._read():
            if scope.is_operator:
                view = MemoryView.of(memory, self._policy).with_tenants(sessions)
            elif scope.owner is None:
                view = MemoryView.of(memory, self._policy)
            else:
                view = MemoryView.of_one(memory, self._policy, sessions.get(scope.owner, []))
            channel.publish_newest("memory", view.model_dump_json().encode())

    def _read(self) -> list[tuple[Scope, Channel]]:
        return [(scope, channel) for scope, channel in self._feed.channels.items() if channel.readers]


def _is_open(session: Session) -> bool:
    return session.state is not SessionState.CLOSED


def _view(scope: Scope, session: Session) -> SessionView:
    return SessionView.of(session).seen_by(scope.owner)

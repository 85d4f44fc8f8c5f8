"""The live stream of what happens to sessions: the feed, its readers, and what each one gets."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import Context
from itertools import islice
from typing import Literal, NamedTuple

from prometheus_client import Gauge

from app.domain.activations import CheckpointInfo
from app.domain.errors import StreamLimit
from app.domain.memory_map import MemoryMap
from app.domain.values import KVPolicy, SessionId, SessionState
from app.messages import Failed, Paused, TurnFinished
from app.sessions.findings import Findings
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session, Watcher
from app.web.sse import sse_event
from app.wire.checkpoint import CheckpointView
from app.wire.history import (
    BreakpointsNews,
    EditNews,
    FindingsView,
    PauseNews,
    SessionNews,
    SnapshotView,
    TimedNews,
    TokensNews,
    TurnNews,
)
from app.wire.memory import MemoryView
from app.wire.sessions import SessionView

logger = logging.getLogger(__name__)

KEPT, KEPT_BYTES = 1024, 1 << 20
"""Most events that a channel keeps, and most bytes of them."""
READ_AT_ONCE = 64
"""Most events that a reader gets in one piece."""
GATHER_S = 0.2
"""How long a reader that has read all waits, to get more in one piece: each takes time from cores that compute."""


class Channel:
    """Numbered events, of which the last are kept. Used on the event loop only.

    A reader whose place is before those that are kept has missed some. Numbers tell a tenant only of its own events.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.lingers: asyncio.TimerHandle | None = None
        """Drops the channel, if no reader returns to it."""
        self.position = 0
        """Number of the last event."""
        self._start = secrets.token_hex(4)
        self._kept: deque[bytearray] = deque()
        """Events as they are sent; one is empty once a newer one has taken its place."""
        self._bytes = 0
        self._newest: dict[str, bytearray] = {}
        self._news = asyncio.Event()

    def id_of(self, position: int) -> str:
        """The id of an event. A channel that has been made anew has others."""
        return f"{self._start}-{position}"

    def find(self, event_id: str | None) -> int | None:
        """The place of a reader that has read up to that event; None: it has missed some, or read none."""
        start, _, number = (event_id or "").partition("-")
        if start != self._start or not (number.isascii() and number.isdigit() and len(number) < 20):
            return None
        position = int(number)
        return position if self._oldest <= position <= self.position else None

    def publish(self, name: str, data: bytes) -> None:
        """Tell all readers."""
        self._append(name, data)

    def publish_newest(self, name: str, data: bytes) -> None:
        """Tell all readers of figures. Only the newest of a name are kept: older ones are of no use."""
        old = self._newest.get(name)
        if old is not None:
            if old in self._kept:  # each has an id of its own
                self._bytes -= len(old)
            old.clear()
        self._newest[name] = self._append(name, data)

    def after(self, position: int) -> tuple[int, bytes] | None:
        """The next events for a reader, and its place behind them; None: it has missed some."""
        if position < self._oldest:
            return None
        first = position - self._oldest
        found = list(islice(self._kept, first, first + READ_AT_ONCE))
        return position + len(found), b"".join(found)

    def wake(self) -> None:
        """Have every reader look."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Return when there is something to look at."""
        await self._news.wait()

    @property
    def _oldest(self) -> int:
        """Number of the last event that is not kept any more."""
        return self.position - len(self._kept)

    def _append(self, name: str, data: bytes) -> bytearray:
        self.position += 1
        kept = bytearray(sse_event(name, data, self.id_of(self.position)))
        self._kept.append(kept)
        self._bytes += len(kept)
        while len(self._kept) > KEPT or (self._bytes > KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft())
        self.wake()
        return kept


INTERVAL_S = 0.2
"""Between two events of one session that has changed again and again: most short turns are one."""
AT_ONCE = 128
"""Most changed sessions that are told of at once: the event loop has turns to serve."""


class Scope(NamedTuple):
    """The reader: a tenant, None without keys. An operator hears of the sessions of all tenants."""

    owner: str | None
    is_operator: bool = False

    def sees(self, session: Session) -> bool:
        """Whether the session is told of."""
        return not session.unseen and (self.is_operator or session.owner == self.owner)


class Feed(Watcher):
    """The watcher of all sessions. `channels` has those with current or recent readers."""

    def __init__(self) -> None:
        self.channels: dict[Scope, Channel] = {}
        self.has_ended = False
        """Whether nothing more will happen."""
        self._changed: dict[SessionId, Session] = {}
        self._grown: dict[SessionId, Session] = {}
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, session: Session) -> None:
        """Tell of a new session."""
        self._tell_session(session, "opened")

    def changed(self, session: Session) -> None:
        """Tell of a changed session soon: much may change until then."""
        if self.channels and session.state is not SessionState.CLOSED and any(self._readers(session)):
            self._changed[session.id] = session
            self._flush_soon()

    def grew(self, session: Session) -> None:
        """Tell of its tokens soon. The count is only looked at then."""
        if self.channels:
            self._grown[session.id] = session
            self._flush_soon()

    def closed(self, session: Session) -> None:
        """Tell of a session that is gone."""
        self._changed.pop(session.id, None)
        self._tell_session(session, "closed")

    def departed(self, session: Session) -> None:
        """Tell nothing: to the readers of a cluster it is as open as before."""
        self._changed.pop(session.id, None)

    def begun(self, session: Session) -> None:
        """Tell of a turn."""
        for _, channel in self._readers(session):
            channel.publish("turn", _json(TurnNews(time=time.time(), session_id=session.id, status="begun")))

    def armed(self, session: Session) -> None:
        """Tell which breakpoints a session has from now on, after what is still to tell of it: they go in a turn."""
        self._tell_after_change(session, "breakpoints", BreakpointsNews, armed=list(session.breakpoints))

    def edited(self, session: Session, place: CheckpointInfo) -> None:
        """Tell of a change to the checkpoint there, after what is still to tell of its pause."""
        self._tell_after_change(session, "edit", EditNews, layer=place.layer, point=place.point)

    def _tell_after_change(self, session: Session, name: str, kind: type[TimedNews], **news: object) -> None:
        if self._changed.pop(session.id, None) is not None:
            self._tell_session(session, "changed")
        for _, channel in self._readers(session) if session.state is not SessionState.CLOSED else ():
            told = kind.model_validate({"time": time.time(), "session_id": session.id, **news})
            channel.publish(name, _json(told))

    def stopped(self, session: Session, event: Paused | TurnFinished | Failed) -> None:
        """Tell of the end of a turn or its pause. That of a session that is gone has ended with it."""
        if session.state is SessionState.CLOSED:
            return
        for _, channel in self._readers(session):
            if not isinstance(event, Paused):
                channel.publish("turn", _json(TurnNews.of_end(session, event, time.time())))
            elif session.pause is not None:  # else a cancel is on its way
                checkpoint = CheckpointView.of(event.checkpoint, session.pause.expires_at)
                news = PauseNews(time=time.time(), session_id=session.id, checkpoint=checkpoint)
                channel.publish("pause", _json(news))

    def end(self) -> None:
        """Have the streams end when they have told the last."""
        self._flush(len(self._changed))
        self.has_ended = True
        for channel in self.channels.values():
            channel.wake()

    def _readers(self, session: Session) -> Iterator[tuple[Scope, Channel]]:
        return ((scope, channel) for scope, channel in self.channels.items() if scope.sees(session))

    def _tell_session(self, session: Session, change: Literal["opened", "changed", "closed"]) -> None:
        view: SessionView | None = None
        for scope, channel in self._readers(session):
            view = view or SessionView.of(session)
            news = SessionNews(time=time.time(), change=change, session=view.seen_by(scope.owner))
            channel.publish("session", _json(news))

    def _tell_tokens(self) -> None:
        """Tell those who read now of the turns that run. A later view of the session has the count too."""
        running = [session for session in self._grown.values() if session.state is SessionState.RUNNING]
        self._grown.clear()
        for scope, channel in self.channels.items():
            if not channel.readers:
                continue
            tokens = {str(session.id): len(session.history) for session in running if scope.sees(session)}
            if tokens:
                channel.publish_newest("tokens", _json(TokensNews(tokens=tokens)))

    def _flush_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._flush, AT_ONCE)

    def _flush(self, most: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for session_id in list(islice(self._changed, most)):
            self._tell_session(self._changed.pop(session_id), "changed")
        self._tell_tokens()
        if self._changed:
            self._flush_soon()


def _json(news: TimedNews | TokensNews) -> bytes:
    return news.model_dump_json().encode()


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

    def __init__(
        self, feed: Feed, registry: SessionRegistry, policy: KVPolicy, findings: Findings, gauge: Gauge
    ) -> None:
        self._feed = feed
        self._findings = findings
        self._registry = registry
        self._policy = policy
        self._gauge = gauge
        self._count = 0
        self._telling: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def reading(self, scope: Scope) -> Iterator[Channel]:
        """Count one more reader. Raises `StreamLimit`, and `Draining` during shutdown."""
        self._registry.table.require_no_drain()
        channel = self._feed.channels.get(scope)
        if channel is not None and channel.readers >= OF_TENANT:
            message = f"{OF_TENANT} event streams of this tenant are open, and no more may be"
            raise StreamLimit(message, retry_after_s=RETRY_AFTER_S)
        if self._count >= OF_ALL:
            message = f"{OF_ALL} event streams are open, and no more may be"
            raise StreamLimit(message, retry_after_s=RETRY_AFTER_S)
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
                if position == channel.position:
                    await asyncio.sleep(GATHER_S)
            elif self._feed.has_ended:
                return
            else:
                await channel.news()

    async def _snapshot(self, scope: Scope, event_id: str) -> AsyncGenerator[bytes, None]:
        """Every session that is told of. Only the last part has the id: a reader with that id has all parts."""
        sessions = [session for session in self._registry.table if scope.sees(session)]
        for first in range(0, len(sessions) or 1, SNAPSHOT_PART):
            has_more = first + SNAPSHOT_PART < len(sessions)
            part = [each for each in sessions[first : first + SNAPSHOT_PART] if each.state is not SessionState.CLOSED]
            views = [SessionView.of(each).seen_by(scope.owner) for each in part]
            data = SnapshotView(time=time.time(), sessions=views, has_more=has_more).model_dump_json().encode()
            yield sse_event("snapshot", data, None if has_more else event_id)
            await asyncio.sleep(0)  # turns go on between two parts

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
        """Tell of memory and of what is wrong, and have every stream ask whether it may go on, for as long as there
        are any.
        """
        while True:
            try:
                self._publish(await self._registry.try_memory())
            except Exception:
                logger.exception("the live stream could not tell of memory; it tries again")
            for _, channel in self._read():
                channel.wake()
            await asyncio.sleep(MEMORY_INTERVAL_S)

    def _publish(self, memory: MemoryMap | None) -> None:
        sessions = self._registry.table.by_owner()
        for scope, channel in self._read():
            wrong = FindingsView.of(self._findings, memory, scope.owner, is_operator=scope.is_operator)
            channel.publish_newest("findings", wrong.model_dump_json().encode())
            if memory is None:
                continue
            if scope.is_operator:
                view = MemoryView.of(memory, self._policy).with_tenants(sessions)
            elif scope.owner is None:
                view = MemoryView.of(memory, self._policy)
            else:
                view = MemoryView.of_one(memory, self._policy, sessions.get(scope.owner, []))
            channel.publish_newest("memory", view.model_dump_json().encode())

    def _read(self) -> list[tuple[Scope, Channel]]:
        return [(scope, channel) for scope, channel in self._feed.channels.items() if channel.readers]

"""Sends events of sessions to the readers that may see them. Without readers it keeps and does nothing."""

import asyncio
import time
from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple

from app.domain.values import SessionId, SessionState
from app.events.channel import Channel
from app.messages import Failed, Paused, TurnFinished
from app.sessions.session import Session
from app.wire.checkpoint import CheckpointView
from app.wire.live import BreakpointsNews, EditNews, PauseNews, SessionNews, TokensNews, TurnNews
from app.wire.sessions import SessionView

INTERVAL_S = 0.1
"""Between two events of one session that has changed again and again."""
AT_ONCE = 128
"""Most changed sessions that are told of at once: the event loop has turns to serve."""


class Scope(NamedTuple):
    """The reader: a tenant, None without keys. An operator hears of the sessions of all tenants."""

    owner: str | None
    is_operator: bool = False

    def sees(self, session: Session) -> bool:
        """Whether the session is told of."""
        return self.is_operator or session.owner == self.owner


class Feed:
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

    def begun(self, session: Session) -> None:
        """Tell of a turn."""
        for _, channel in self._readers(session):
            channel.publish("turn", _json(TurnNews(time=time.time(), session_id=session.id, status="begun")))

    def armed(self, session: Session) -> None:
        """Tell which breakpoints a session has from now on, after what is still to tell of it: they go in a turn."""
        if self._changed.pop(session.id, None) is not None:
            self._tell_session(session, "changed")
        for _, channel in self._readers(session) if session.state is not SessionState.CLOSED else ():
            news = BreakpointsNews(time=time.time(), session_id=session.id, armed=list(session.breakpoints))
            channel.publish("breakpoints", _json(news))

    def edited(self, session: Session, layer: int) -> None:
        """Tell of a change to the checkpoint after that layer, after what is still to tell of its pause."""
        if self._changed.pop(session.id, None) is not None:
            self._tell_session(session, "changed")
        for _, channel in self._readers(session) if session.state is not SessionState.CLOSED else ():
            channel.publish("edit", _json(EditNews(time=time.time(), session_id=session.id, layer=layer)))

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


def _json(news: SessionNews | TokensNews | TurnNews | PauseNews | BreakpointsNews | EditNews) -> bytes:
    return news.model_dump_json().encode()

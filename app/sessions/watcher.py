"""Who is told of what happens to sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from app.messages import Failed, Paused, TurnFinished

if TYPE_CHECKING:
    from app.sessions.session import Session


class Watcher(Protocol):
    """Told of sessions that can be found, on the event loop. It must neither raise nor wait."""

    def opened(self, session: Session) -> None:
        """From now on the session is found."""
        ...

    def changed(self, session: Session) -> None:
        """Its state, phase, history or KV is another. Not told of each token."""
        ...

    def closed(self, session: Session) -> None:
        """The session is gone. Its turn, if it has one, ends with it."""
        ...

    def begun(self, session: Session) -> None:
        """A turn is in the queue."""
        ...

    def stopped(self, session: Session, event: Paused | TurnFinished | Failed) -> None:
        """The turn has paused or is over; the session has followed already."""
        ...

    def end(self) -> None:
        """The server shuts down, and nothing more will happen."""
        ...


class Nobody:
    """Watches nothing."""

    def opened(self, session: Session) -> None:
        """Pass over it."""

    def changed(self, session: Session) -> None:
        """Pass over it."""

    def closed(self, session: Session) -> None:
        """Pass over it."""

    def begun(self, session: Session) -> None:
        """Pass over it."""

    def stopped(self, session: Session, event: Paused | TurnFinished | Failed) -> None:
        """Pass over it."""

    def end(self) -> None:
        """Pass over it."""


NOBODY = Nobody()

"""The listener for events of sessions."""

from typing import Protocol, TypeVar

from app.messages import Failed, Paused, TurnFinished

S = TypeVar("S", contravariant=True)
"""The session: its file imports this one."""


class Watcher(Protocol[S]):
    """Told of sessions that can be found, on the event loop. It must neither raise nor wait."""

    def opened(self, session: S) -> None:
        """From now on the session is found."""
        ...

    def changed(self, session: S) -> None:
        """Its state, phase, history or KV is another. Not told of each token."""
        ...

    def grew(self, session: S) -> None:
        """The turn has one more token. Called for each: it must cost next to nothing."""
        ...

    def closed(self, session: S) -> None:
        """The session is gone. Its turn, if it has one, ends with it."""
        ...

    def begun(self, session: S) -> None:
        """A turn is in the queue."""
        ...

    def armed(self, session: S) -> None:
        """Its breakpoints are others."""
        ...

    def edited(self, session: S, layer: int) -> None:
        """A client has changed the checkpoint of its paused turn, which was after that layer."""
        ...

    def stopped(self, session: S, event: Paused | TurnFinished | Failed) -> None:
        """The turn has paused or is over; the session has followed already."""
        ...

    def end(self) -> None:
        """The server shuts down, and nothing more will happen."""
        ...


class Nobody:
    """Watches nothing."""

    def opened(self, session: object) -> None:
        """Pass over it."""

    def changed(self, session: object) -> None:
        """Pass over it."""

    def grew(self, session: object) -> None:
        """Pass over it."""

    def closed(self, session: object) -> None:
        """Pass over it."""

    def begun(self, session: object) -> None:
        """Pass over it."""

    def armed(self, session: object) -> None:
        """Pass over it."""

    def edited(self, session: object, layer: int) -> None:
        """Pass over it."""

    def stopped(self, session: object, event: Paused | TurnFinished | Failed) -> None:
        """Pass over it."""

    def end(self) -> None:
        """Pass over it."""


NOBODY = Nobody()

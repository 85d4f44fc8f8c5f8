"""Orders that wait for a worker."""

import threading
from typing import Generic, Protocol, TypeVar

from app.domain.values import SessionId
from app.gpu.state.moves import MoveKind


class Ordered(Protocol):
    """A move, as far as its turn goes."""

    @property
    def kind(self) -> MoveKind: ...

    @property
    def session(self) -> SessionId: ...


T = TypeVar("T", bound=Ordered)
R = TypeVar("R")


class Orders(Generic[T, R]):
    """First come, first served, but reads from disk pass all orders of other sessions: somebody waits for each, and for
    a write nobody. What is ordered for one session is done in its order.

    Moves come with whatever they must come after. Any thread may put and get.
    """

    def __init__(self) -> None:
        self._orders: list[tuple[T, R]] = []
        self._closed = False
        self._doing: SessionId | None = None
        """Whose order the worker has."""
        self._came = threading.Condition()

    def put(self, move: T, ready: R) -> None:
        """Take an order."""
        with self._came:
            self._orders.append((move, ready))
            self._came.notify_all()

    def close(self) -> None:
        """No more come. Whoever gets has those that are there, and then None."""
        with self._came:
            self._closed = True
            self._came.notify_all()

    def get(self) -> tuple[T, R] | None:
        """The next order; waits for one. The worker has done the one before."""
        with self._came:
            self._doing = None
            self._came.notify_all()
            self._came.wait_for(lambda: self._orders or self._closed)
            order = self._orders.pop(self._next()) if self._orders else None
            self._doing = None if order is None else order[0].session
            return order

    def wait_for(self, session: SessionId) -> None:
        """Return when nothing is left to do of what was ordered for the session."""
        with self._came:
            self._came.wait_for(lambda: session != self._doing and all(session != it.session for it, _ in self._orders))

    def _next(self) -> int:
        earlier = set[SessionId]()
        for place, (move, _) in enumerate(self._orders):
            if move.kind is MoveKind.FROM_DISK and move.session not in earlier:
                return place
            earlier.add(move.session)
        return 0

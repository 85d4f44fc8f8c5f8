"""Sessions with a turn in them, so that a new turn costs nothing for each idle session."""

from collections import defaultdict
from collections.abc import Collection

from app.sessions.session import Session


class BusySessions:
    """Those of each owner, from when it is told of a session until the session leaves."""

    def __init__(self) -> None:
        self._busy: defaultdict[str | None, set[Session]] = defaultdict(set)

    def follow(self, session: Session) -> None:
        """Look at the session now, and at each new state."""
        session.on_move = self._note
        self._note(session)

    def leave(self, session: Session) -> None:
        """The session has no turn, or is gone."""
        busy = self._busy.get(session.owner, set())
        busy.discard(session)
        if not busy:
            self._busy.pop(session.owner, None)

    def of(self, owner: str | None) -> Collection[Session]:
        """The owner's."""
        return self._busy.get(owner, ())

    def count(self, owner: str | None) -> int:
        """The owner's turns in the queue or in the engine; paused ones are in neither."""
        return sum(session.under_way for session in self.of(owner))

    def any_run(self) -> bool:
        """Whether anybody has turns in the queue or in the engine."""
        return any(map(self.count, self._busy))

    def others_run(self, owner: str | None) -> bool:
        """Whether other owners have turns in the queue or in the engine."""
        return any(self.count(other) for other in self._busy if other != owner)

    def _note(self, session: Session) -> None:
        if session.busy:
            self._busy[session.owner].add(session)
        else:
            self.leave(session)

"""Ids of sessions name the server that made them. This says where sessions are at home that have moved.

Each move of a session has a number, its epoch, one more than all before. The old home writes down that the session is
leaving before the new home may take it, and asks whether it did if it does not hear of it. So there is one home, or for
a while a session that no server serves. `docs/design/moves.md` has the protocol.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from app.domain.values import SessionId

MOST_KEPT = 1 << 16
"""Changes after which a server forgets a session that is not here any more."""
MOST_RESPONSES = 1 << 17
"""Responses of such sessions that are remembered: those that went last."""


class HomeState(StrEnum):
    """What a server knows of a session that has moved, or was about to."""

    HERE = "here"
    LEAVING = "leaving"
    """The other server may have it."""
    GONE = "gone"
    CLOSED = "closed"
    """It was here at its end."""


class Taken(StrEnum):
    """The answer to whether a session has been taken."""

    YES = "yes"
    NO = "no"
    FORGOTTEN = "forgotten"
    """It may have been: with another journal, or it has gone again, too long ago."""


class MoveReason(StrEnum):
    """Why a session goes to another server."""

    OPERATOR = "operator"
    """Somebody has said so."""
    DRAIN = "drain"
    """The server shuts down."""
    BALANCE = "balance"
    """The server is full, and the other one has room."""


@dataclass(frozen=True, slots=True)
class Home:
    """What one server knows of one session, by the session's last move from it or to it."""

    state: HomeState
    epoch: int
    seq: int
    """The server's own count of all such changes."""
    peer: str = ""
    """The server that it goes to, or has gone to; or has come from."""
    peer_seq: int = 0
    """That server's count when the session began to leave: it has taken it only if its count for that is higher."""
    owner: str | None = None
    """The session's owner: other tenants do not learn where it is."""
    name: str | None = None
    """What its owner's calls name it by."""
    peer_journal: str = ""
    """The UUID of the journal in which the server that it goes to may have noted it."""


class Homes:
    """What one server knows, in memory; the caller writes each change to the journal. Without a move it is empty."""

    def __init__(
        self, known: Mapping[SessionId, Home] | None = None, responses: Iterable[tuple[str, SessionId]] = ()
    ) -> None:
        """`responses` are those that have gone, each with its session, in that order."""
        self._known = dict(known or {})
        self.seq = max((home.seq for home in self._known.values()), default=0)
        self._named: dict[tuple[str | None, str], SessionId] = {}
        """Whom a name meant last, of the sessions that have moved."""
        self._went: dict[str, SessionId] = {}
        """The session that each response went with. It may be here again."""
        self._index()
        self._note_responses(responses)

    def of(self, session: SessionId) -> Home | None:
        """What is known of the session."""
        return self._known.get(session)

    def epoch(self, session: SessionId) -> int:
        """The number of the session's last move; 0 before the first."""
        known = self._known.get(session)
        return 0 if known is None else known.epoch

    def gone_by_name(self, owner: str | None, name: str) -> SessionId | None:
        """The session that has gone and was the last that the owner's calls named so; None: there is none, or one of
        that name has been here since.
        """
        return self._if_gone(self._named.get((owner, name)))

    def gone_by_response(self, response: str) -> SessionId | None:
        """The session that has gone and has taken the response along."""
        return self._if_gone(self._went.get(response))

    def leave(
        self,
        session: SessionId,
        owner: str | None,
        peer: str,
        peer_seq: int,
        name: str | None = None,
        peer_journal: str = "",
    ) -> Home:
        """It may be taken from now on."""
        epoch = self.epoch(session) + 1
        return self._put(session, Home(HomeState.LEAVING, epoch, 0, peer, peer_seq, owner, name, peer_journal))

    def stay(self, session: SessionId) -> Home:
        """It has not been taken, and will not be with this epoch."""
        return self._put(session, replace(self._known[session], state=HomeState.HERE))

    def go(self, session: SessionId, responses: Iterable[str] = ()) -> Home:
        """It has been taken, and its responses with it."""
        self._note_responses((each, session) for each in responses)
        return self._put(session, replace(self._known[session], state=HomeState.GONE))

    def arrive(self, session: SessionId, owner: str | None, peer: str, epoch: int, name: str | None = None) -> Home:
        """It is taken here."""
        return self._put(session, Home(HomeState.HERE, epoch, 0, peer, 0, owner, name))

    def undo(self, session: SessionId, before: Home | None) -> None:
        """It has not been taken after all: what was known `before` holds."""
        if before is None:
            self._known.pop(session, None)
        else:
            self._known[session] = before
        self._index()

    def close(self, session: SessionId) -> None:
        """It has come to its end here."""
        known = self._known.get(session)
        if known is not None and known.state is not HomeState.GONE:
            self._known[session] = replace(known, state=HomeState.CLOSED)

    def has_taken(self, session: SessionId, epoch: int, seq: int) -> Taken:
        """Whether this server has taken the session with the move of that number, which began when its count was
        `seq`.
        """
        if self.epoch(session) >= epoch:
            return Taken.YES
        return Taken.FORGOTTEN if self.seq - MOST_KEPT > seq else Taken.NO

    def _put(self, session: SessionId, home: Home) -> Home:
        self.seq += 1
        home = self._known[session] = replace(home, seq=self.seq)
        if home.name is not None:
            self._named[home.owner, home.name] = session
        old = self.seq - MOST_KEPT
        if old > 0 and self.seq % 1024 == 0:
            gone = (HomeState.GONE, HomeState.CLOSED)
            self._known = {each: it for each, it in self._known.items() if it.seq > old or it.state not in gone}
            self._went = {each: it for each, it in self._went.items() if it in self._known}
            self._index()
        return home

    def _index(self) -> None:
        in_order = sorted(self._known.items(), key=lambda each: each[1].seq)
        self._named = {(home.owner, home.name): each for each, home in in_order if home.name is not None}

    def _note_responses(self, responses: Iterable[tuple[str, SessionId]]) -> None:
        for response, session in responses:
            self._went.pop(response, None)
            self._went[response] = session
            if len(self._went) > MOST_RESPONSES:
                del self._went[next(iter(self._went))]

    def _if_gone(self, session: SessionId | None) -> SessionId | None:
        home = None if session is None else self._known.get(session)
        return session if home is not None and home.state is HomeState.GONE else None


REPLICA_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
"""Of a server among others of a cluster."""

_NAMED = re.compile(rf"ses_({REPLICA_NAME.pattern})_[0-9a-f]{{36}}")
_NAMED_RESPONSE = re.compile(rf"(?:resp|conv)_({REPLICA_NAME.pattern})_[0-9a-f]{{32}}")


def new_session_id(replica: str | None = None) -> SessionId:
    """A fresh id: the replica, the time in ns, so that ids of one replica sort by age, and 80 random bits, so that
    no client can guess one.
    """
    home = "" if replica is None else f"{replica}_"
    return SessionId(f"ses_{home}{time.time_ns():016x}{secrets.token_hex(10)}")


def home_of(session_id: str) -> str | None:
    """The replica that made the session; None for an id that names none, or is none."""
    named = _NAMED.fullmatch(session_id)
    return None if named is None else named[1]


def new_response_id(replica: str | None = None, *, prefix: str = "resp") -> str:
    """A fresh id of a response, or with `prefix` of a conversation: the replica, and 128 random bits, so that no client
    can guess one.
    """
    home = "" if replica is None else f"{replica}_"
    return f"{prefix}_{home}{secrets.token_hex(16)}"


def home_of_response(response_id: str) -> str | None:
    """The replica that made the response or conversation; None for an id that names none, or is none."""
    named = _NAMED_RESPONSE.fullmatch(response_id)
    return None if named is None else named[1]

"""Requests with an `Idempotency-Key`: what each has done, so that a client may repeat it and nothing is done twice."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.domain.values import SessionId, Ticket
from app.engine_process.turn import Turn
from app.journal.records import DoneTurn, KeyedRecord
from app.journal.tables import KEPT_S, MOST_KEYS
from app.messages import Token, TurnFinished

MOST_ANSWERS_BYTES = 64 << 20
"""Of all answers that are kept in memory. The oldest are forgotten for new ones."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A whole answer, as it was sent."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(slots=True, eq=False)
class KeyedRequest:
    """One request with a key, from its first arrival on. Routes note here what they have done for it."""

    owner: str | None
    key: str
    digest: bytes
    """Of path, query and body: a request with the same key and another digest is refused."""
    at: float
    """When it came, in Unix seconds."""
    session: SessionId | None = None
    """The session that it has opened, or that its turn is in."""
    response: str | None = None
    """The id of the response that its turn is for."""
    turn: DoneTurn | None = None
    """Its turn, once that is over."""
    is_running: bool = False
    """Whether it is being answered."""
    is_done: bool = False
    """Whether it has changed a session: to do it again would change that twice."""
    is_answered: bool = False
    """Whether its answer is one to be given again: no error, and nothing is missing."""
    outlives_client: bool = False
    """Whether it runs on for a while after its client has disconnected."""
    is_left: bool = False
    """Whether it is being cancelled as no client waits for it: a turn that began now would stay half done."""
    answer: KeptAnswer | None = None

    def finish(self, session: SessionId, token_ids: Iterable[int], event: TurnFinished) -> None:
        """Note how its turn in `session` has ended."""
        self.session, self.is_done = session, True
        self.turn = DoneTurn(tuple(token_ids), event.reason, event.usage)

    def record(self, session: SessionId) -> KeyedRecord:
        """What is journaled of it, with the change of `session` that it has made."""
        return KeyedRecord(self.owner, self.key, self.digest, self.at, session, self.response, self.turn)


def repeated_turn(done: DoneTurn) -> Turn:
    """The turn again, for another reader."""
    ticket, turn = Ticket(0), Turn(Ticket(0))
    for token_id in done.token_ids:
        turn.deliver(Token(ticket, token_id))
    length = done.usage.prompt_tokens + len(done.token_ids)
    turn.deliver(TurnFinished(ticket, done.reason, done.usage, length))
    return turn


class KeyedRequests:
    """All tenants' requests with keys, each kept for a day. Used on the event loop only."""

    def __init__(self, records: Iterable[KeyedRecord] = (), clock: Callable[[], float] = time.time) -> None:
        """`records` are those of the journal, the oldest first. `clock` gives Unix seconds."""
        self._clock = clock
        self._of_owner: defaultdict[str | None, OrderedDict[str, KeyedRequest]] = defaultdict(OrderedDict)
        """By key, the oldest first."""
        self._of_session: defaultdict[SessionId, set[KeyedRequest]] = defaultdict(set)
        self._answers: OrderedDict[KeyedRequest, int] = OrderedDict()
        """Those with a kept answer and its bytes, the oldest first."""
        self._answers_bytes = 0
        self.adopt(records)

    def adopt(self, records: Iterable[KeyedRecord]) -> None:
        """Know what has been done before this server began, or on another one. The oldest come first."""
        for record in records:
            request = KeyedRequest(record.owner, record.key, record.digest, record.at, record.session, record.response)
            request.turn, request.is_done = record.turn, True
            self._of_owner[record.owner][record.key] = request
            self._of_session[record.session].add(request)

    def of_session(self, session: SessionId) -> list[KeyedRecord]:
        """What has been done in the session, the oldest first."""
        done = [each for each in self._of_session.get(session, ()) if each.is_done]
        return [each.record(session) for each in sorted(done, key=lambda each: each.at)]

    def find(self, owner: str | None, key: str) -> KeyedRequest | None:
        """The owner's request with that key, if it came within a day."""
        found = self._of_owner[owner].get(key)
        if found is not None and found.at + KEPT_S <= self._clock():
            self._forget(found)
            return None
        return found

    def begin(self, owner: str | None, key: str, digest: bytes) -> KeyedRequest:
        """Take a request that is not known. Old ones are forgotten for it, but none that is being answered."""
        request, requests = KeyedRequest(owner, key, digest, self._clock()), self._of_owner[owner]
        while (oldest := next((each for each in requests.values() if not each.is_running), None)) is not None:
            if len(requests) < MOST_KEYS and oldest.at + KEPT_S > self._clock():
                break
            self._forget(oldest)
        requests[key] = request
        return request

    def end(self, request: KeyedRequest, answer: KeptAnswer | None) -> None:
        """Note that a request has been answered or has failed. One that changed nothing is forgotten."""
        request.is_running = False
        if self._of_owner[request.owner].get(request.key) is not request:  # its session has closed
            return
        if answer is not None and request.is_answered:
            self._keep(request, answer)
        if not (request.is_done or request.answer):
            self._forget(request)
        elif request.session is not None:
            self._of_session[request.session].add(request)

    def finished(self, request: KeyedRequest) -> None:
        """Its turn has changed a session, perhaps after its client had gone: know it again if it was forgotten."""
        assert request.session is not None
        self._of_owner[request.owner].setdefault(request.key, request)
        self._of_session[request.session].add(request)

    def forget_session(self, session: SessionId) -> None:
        """The session is gone, and with it what requests have done there."""
        for request in self._of_session.pop(session, ()):
            self._forget(request)

    def _keep(self, request: KeyedRequest, answer: KeptAnswer) -> None:
        if len(answer.body) > MOST_ANSWERS_BYTES // 16:
            return
        request.answer = answer
        self._answers[request] = len(answer.body)
        self._answers_bytes += len(answer.body)
        while self._answers_bytes > MOST_ANSWERS_BYTES:
            oldest = next(iter(self._answers))
            self._drop_answer(oldest)
            if not oldest.is_done:
                self._forget(oldest)

    def _drop_answer(self, request: KeyedRequest) -> None:
        self._answers_bytes -= self._answers.pop(request, 0)
        request.answer = None

    def _forget(self, request: KeyedRequest) -> None:
        self._drop_answer(request)
        requests = self._of_owner[request.owner]
        if requests.get(request.key) is request:
            del requests[request.key]
        others = None if request.session is None else self._of_session.get(request.session)
        if request.session is not None and others is not None:
            others.discard(request)
            if not others:
                del self._of_session[request.session]

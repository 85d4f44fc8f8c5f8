"""The first token of a session that never left the device, that was called back in time, and that comes unannounced."""

import random
import time
from dataclasses import dataclass

from benchmarks.kv.turns import extend, fetch, first_token_s, park
from benchmarks.text import TokenSource
from client import Djinn
from loadgen.peers.process import ServerFailedError

NEW_TOKENS = 16
REST_S = 0.1
"""How long the server rests before each turn, whatever its kind: a `ready` has so much time to be carried out."""


@dataclass(frozen=True, slots=True)
class ResumedTurn:
    """first_token_s: as the client sees it; restore_s: how long, by the server, the turn waited for its KV."""

    first_token_s: float
    restore_s: float


@dataclass(frozen=True, slots=True)
class ResumeRound:
    """One turn of each kind, in random order. The second resident one tells how much of a difference is noise."""

    resident: ResumedTurn
    resident_again: ResumedTurn
    ready: ResumedTurn
    cold: ResumedTurn


class ResumeBench:
    """One session whose history always has the same length, and another that takes its place on the device.

    A device keeps the blocks of a session that has been parked until somebody needs the room, and a session that
    comes back soon finds them there. The other session must be as large as the device less one block, which a prefetch
    leaves to a session that had a turn just before: then it leaves nothing to be found.
    """

    def __init__(
        self, client: Djinn, source: TokenSource, seed: int, *, history_tokens: int, other_tokens: int
    ) -> None:
        self._source = source
        self._random = random.Random(seed)
        self._history_tokens = history_tokens
        data = client.memory().data
        self._kv_bytes = history_tokens // data.block_tokens * data.block_bytes
        self._session = client.sessions.create()
        extend(self._session, source.take(history_tokens))
        self._session.rewind(history_tokens)
        park(self._session)
        self._other = client.sessions.create()
        extend(self._other, source.take(other_tokens))
        park(self._other)
        fetch(self._session)

    def run(self, rounds: int) -> list[ResumeRound]:
        """Turns in random alternation. Raises ServerFailedError if one of them did not come back as its kind does."""
        self._round()  # not kept: nothing shall be allocated or compiled under the clock
        return [self._round() for _ in range(rounds)]

    def close(self) -> None:
        """Free what the sessions hold."""
        self._session.close()
        self._other.close()

    def _round(self) -> ResumeRound:
        kinds = {"resident": self._turn, "resident_again": self._turn, "ready": self._ready, "cold": self._cold}
        order = self._random.sample(list(kinds), len(kinds))
        return ResumeRound(**{kind: kinds[kind]() for kind in order})

    def _ready(self) -> ResumedTurn:
        before = self._send_away()
        fetch(self._session)
        self._check_copied(before)
        turn = self._turn()
        if turn.restore_s:
            raise ServerFailedError("a session that was back on the device had to wait for its KV")
        return turn

    def _cold(self) -> ResumedTurn:
        before = self._send_away()
        turn = self._turn()
        self._check_copied(before)
        return turn

    def _send_away(self) -> int:
        """Park the session and let the other one pass over the device; returns the session's `bytes_in` so far."""
        park(self._session)
        fetch(self._other)
        park(self._other)
        return self._session.info.usage.bytes_in

    def _turn(self) -> ResumedTurn:
        new_tokens = self._source.take(NEW_TOKENS)
        time.sleep(REST_S)
        seconds = first_token_s(self._session, new_tokens)
        restore_ms = self._session.rewind(self._history_tokens).usage.resume_ms.restore
        return ResumedTurn(seconds, restore_ms / 1000)

    def _check_copied(self, before: int) -> None:
        copied = self._session.refresh().usage.bytes_in - before
        if copied < 0.9 * self._kv_bytes:
            raise ServerFailedError(f"{copied} of {self._kv_bytes} bytes came back: the device had the rest")

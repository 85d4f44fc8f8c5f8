"""Turns as they are counted for their owners: before they begin, while they run, and when they have ended, or when the
engine has died beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from app.domain.errors import BeyondTenantLimit, DeadlyTurn, FieldOutOfRange, LogprobsFull, TenantLimit
from app.domain.values import ModelInfo, Quotas, Settle
from app.machine.budget import Budget, byte_budget
from app.messages import Failed, Started, TurnEvent, TurnFinished
from app.sessions.table import SessionTable

logger = logging.getLogger(__name__)

BYTES_EACH = 256
"""Of one log-probability. Measured: 122 as an object, and 73 as JSON of a chat, which is written while the object is
there. While a prompt is scored, the engine's process has the object too: that one is not counted.
"""


def logprob_budget(max_bytes: int) -> Budget:
    """What the log-probabilities of all calls may have together, in bytes. Its error is `LogprobsFull`."""
    what = "the log-probabilities of calls under way (max_logprobs_bytes)"
    return byte_budget(max_bytes, what, partial(LogprobsFull, retry_after_s=RETRY_AFTER_S))


class TurnCharge:
    """What one turn costs its owner: the tokens that it brings and that have no KV yet, and those that it generates."""

    def __init__(
        self, settle: Settle, *, sent: int, generated: int = 0, give_back: Callable[[], None] = lambda: None
    ) -> None:
        """`sent` tokens come with the turn, or are left of it. It has `generated` some already, in the session that it
        was copied from. `give_back` is called once the turn has ended and the call that began it is answered.
        """
        self._settle = settle
        self._sent = sent
        self._generated = generated
        self._give_back = give_back
        self._has_run = False
        self._is_settled = False
        self._is_answered = False

    @property
    def uncounted(self) -> int:
        """Tokens that the turn left to its session's next one: it ended before it ran."""
        return 0 if self._has_run else self._sent

    def observe(self, event: TurnEvent) -> None:
        """Settle with the turn's end. One that failed, or never left the queue, costs nothing itself."""
        self._has_run |= isinstance(event, Started)
        if isinstance(event, TurnFinished):
            usage = event.usage
            # What the server has dropped and recomputes is not the owner's.
            sent = min(self._sent, usage.prompt_tokens - usage.cached_tokens) if self._has_run else 0
            self._settle_once(sent + usage.completion_tokens - self._generated)
        elif isinstance(event, Failed):
            self.drop()

    def drop(self) -> None:
        """Give everything back: the turn has not begun, or has failed."""
        self._settle_once(0)

    def answered(self) -> None:
        """The call that began the turn, or was to, is over."""
        self._is_answered = True
        if self._is_settled:
            self._give_back()

    def _settle_once(self, used: int) -> None:
        # A copy that its client no longer waits for is dropped, and ends all the same.
        if not self._is_settled:
            self._is_settled = True
            self._settle(used)
            if self._is_answered:
                self._give_back()


RETRY_AFTER_S = 1
MOST_RESERVED = 4096
"""Generated tokens of one turn that are reserved: few turns make use of all that they may generate."""


@dataclass(frozen=True, slots=True)
class TurnNeed:
    """Tokens of a turn that is to begin: its `context`, of these the `sent` ones that it may have to compute, and the
    `most` that it may generate. It may report `logprobs` log-probabilities.
    """

    context: int
    sent: int
    most: int
    logprobs: int = 0


def reported(alternatives: int | None, tokens: int) -> int:
    """How many log-probabilities `tokens` tokens have, each with `alternatives` others; None: none are asked for."""
    return 0 if alternatives is None else tokens * (alternatives + 1)


class Charges:
    """Counts the turns of all owners, and those that calls have yet to begin. Used on the event loop only."""

    def __init__(self, table: SessionTable, quotas: Quotas, logprobs: Budget, model: ModelInfo) -> None:
        self._table = table
        self._quotas = quotas
        self._logprobs = logprobs
        self._model = model
        self._coming: defaultdict[str | None, dict[TurnCharge, int]] = defaultdict(dict)
        """Each owner's turns that calls have yet to begin, with the tokens of their contexts."""

    def reserve(
        self, owner: str | None, needs: Sequence[TurnNeed], cleanup: contextlib.AsyncExitStack, *, generated: int = 0
    ) -> list[TurnCharge]:
        """Count turns that a call will `begin`. What has not begun when `cleanup` unwinds is given back. Copies of a
        paused turn have `generated` some already.

        Raises `TenantLimit`, `RateLimited` and `LogprobsFull` unless the owner may have all of them now, and
        `BeyondTenantLimit` or `FieldOutOfRange` unless it ever may.
        """
        self._require(owner, [need.context for need in needs])
        logprobs = sum(need.logprobs for need in needs)
        if logprobs:
            self._require_logprobs(owner, logprobs)
        settles = self._quotas.reserve(owner, [need.sent + min(need.most, MOST_RESERVED) for need in needs])
        if logprobs:
            self._logprobs.take(owner, logprobs * BYTES_EACH)
        charges = []
        for settle, need in zip(settles, needs, strict=True):
            give_back = partial(self._logprobs.give, owner, need.logprobs * BYTES_EACH)
            charge = TurnCharge(settle, sent=need.sent, generated=generated, give_back=give_back)
            self._coming[owner][charge] = need.context
            cleanup.callback(self._answered, owner, charge)
            charges.append(charge)
        return charges

    def begin(self, owner: str | None, charge: TurnCharge) -> None:
        """The owner's turn has begun: its session counts from now on, and its end settles."""
        del self._coming[owner][charge]

    def _require(self, owner: str | None, new: Sequence[int]) -> None:
        """Raise `TenantLimit` unless the owner may have more turns that wait, run or are paused, with contexts of `new`
        tokens; `BeyondTenantLimit` if it could not even without any others.
        """
        limits = self._quotas.limits(owner)
        if limits.turns_at_once is None and limits.device_bytes is None:
            return
        busy = [len(session.history) for session in self._table.busy_of(owner)]
        busy += self._coming[owner].values()
        most = limits.turns_at_once
        if most is not None and len(busy) + len(new) > most:
            limit = f"{most} turn{'s' * (most > 1)} at once"
            raise _refusal(limit, len(busy), len(new), ever=len(new) <= most)
        room, size, state = limits.device_bytes, self._model.kv_bytes_per_token, self._model.state_bytes
        held, asked = sum(busy) * size + len(busy) * state, sum(new) * size + len(new) * state
        if room is not None and held + asked > room:
            limit = f"{room} bytes of KV of turns under way"
            raise _refusal(limit, held, asked, ever=asked <= room)

    def turns_at_once(self, owner: str | None) -> int | None:
        """How many turns the owner may have at once; None: no limit but the server's."""
        return self._quotas.limits(owner).turns_at_once

    def _require_logprobs(self, owner: str | None, count: int) -> None:
        """Raise `LogprobsFull` unless a call may report `count` log-probabilities now, and `FieldOutOfRange` unless one
        ever may.
        """
        if count * BYTES_EACH > self._logprobs.limit:
            raise FieldOutOfRange(
                f"logprobs: this call may report {count:,} log-probabilities, and at most "
                f"{self._logprobs.limit // BYTES_EACH:,} fit max_logprobs_bytes: ask for fewer of them, or for fewer "
                "tokens",
                param="logprobs",
            )
        self._logprobs.require(owner, count * BYTES_EACH)

    def _answered(self, owner: str | None, charge: TurnCharge) -> None:
        if self._coming[owner].pop(charge, None) is not None:
            charge.drop()
        charge.answered()


def _refusal(limit: str, held: int, needed: int, *, ever: bool) -> TenantLimit | BeyondTenantLimit:
    """`ever`: whether there can be as much as this call needs."""
    message = f"the limit of this tenant is {limit}: "
    if not ever:
        return BeyondTenantLimit(f"{message}this call alone needs {needed}")
    return TenantLimit(f"{message}they have {held}, and this call needs {needed}", retry_after_s=RETRY_AFTER_S)


MOST_DEATHS = 3
KNOWN_FOR_S = 3600.0
MOST_KNOWN = 4096
"""Contexts that are remembered. More turns are not there when an engine dies."""


@dataclass(slots=True)
class _Deaths:
    count: int = 0
    last: int = 0
    """The number of the last one."""
    last_at: float = 0.0


class DeadlyTurns:
    """Counts the deaths of the engine beside turns, which it knows by their owner and their context. Used on the event
    loop only.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` tells the time in seconds."""
        self._now = now
        self._known: OrderedDict[bytes, _Deaths] = OrderedDict()
        self._suspects: list[tuple[str | None, array[int]]] = []
        """Turns that ended because the engine had stalled."""

    def check(self, owner: str | None, context: array[int], *, param: str) -> None:
        """Raise `DeadlyTurn` if the engine has died too often while a turn of that context waited or ran."""
        while self._known and next(iter(self._known.values())).last_at <= self._now() - KNOWN_FOR_S:
            self._known.popitem(last=False)
        # While no engine has died lately, this costs nothing.
        deaths = self._known.get(_digest(owner, context)) if self._known else None
        if deaths is not None and deaths.count >= MOST_DEATHS:
            raise DeadlyTurn(
                f"the engine died {deaths.count} times while this turn was there: it is not started again within "
                f"{KNOWN_FOR_S / 60:.0f} minutes, unless its tokens are others",
                param=param,
            )

    def note_death(self, owner: str | None, context: array[int], death: int) -> None:
        """The engine died while the turn waited or ran. `death` is the number of its deaths so far, from 1 on: of turns
        that are alike, such as choices of one prompt, only one counts for each.
        """
        digest = _digest(owner, context)
        deaths = self._known.setdefault(digest, _Deaths())
        if deaths.last == death:
            return
        self._known.move_to_end(digest)
        deaths.count += 1
        deaths.last, deaths.last_at = death, self._now()
        if deaths.count == MOST_DEATHS:
            logger.error("a turn of %d tokens was there at %d deaths of the engine: refused", len(context), MOST_DEATHS)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def suspect(self, owner: str | None, context: array[int]) -> None:
        """The engine stalled while the turn waited or ran. It counts if the engine then dies of it."""
        self._suspects.append((owner, context))

    def condemn(self, death: int) -> None:
        """The engine that had stalled has died: so note its death for each turn that was there then."""
        for owner, context in self._suspects:
            self.note_death(owner, context, death)
        self._suspects.clear()

    def clear(self) -> None:
        """Note that a stalled engine makes progress again: its turns did no harm."""
        self._suspects.clear()

    def note_end(self, owner: str | None, context: array[int]) -> None:
        """The turn has come to an end, so it does no harm."""
        if self._known:
            self._known.pop(_digest(owner, context), None)


def _digest(owner: str | None, context: array[int]) -> bytes:
    return hashlib.blake2b(
        context.tobytes(), digest_size=16, key=hashlib.sha256((owner or "").encode()).digest()
    ).digest()

"""What agents write down while they run: answers, and errors that a fault explains or does not."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from client.errors import APIError, Conflict, ConnectionFailed, ConnectionLost, DjinnError, RateLimited
from loadgen.experiments.chaos.findings import Fault, Findings
from loadgen.load.prompts import TokenIds
from loadgen.report.tables import Row

GRACE_S = 3.0
"""A fault explains errors for so long after the server is ready: a call may have waited for it until then."""
EXPECTED_CODES = frozenset(
    {
        "engine_restarting",
        "engine_stalled",
        "draining",
        "journal_unavailable",
        "not_durable",
        "disk_full",
        "connection_limit",
        "replica_away",
        "replica_lost",
        "directory_away",
    }
)
MOVING = frozenset({"moving", "moving_on"})
"""What a replica answers while a session moves, whoever moves it."""
SHOWN = 40
"""Characters of an answer."""


def can_be_expected(error: DjinnError) -> bool:
    """Whether a fault can be the cause: the server is away, or says that it is, or has lost a pause or not yet ended a
    turn whose client is gone.
    """
    if isinstance(error, ConnectionFailed | ConnectionLost | RateLimited | Conflict):
        return True
    return isinstance(error, APIError) and error.code in EXPECTED_CODES | MOVING


class Notes:
    """Writes findings on a clock that starts with it."""

    def __init__(self, findings: Findings, *, moves: bool = False) -> None:
        self.findings = findings
        self._moves = moves
        self._started = time.perf_counter()
        self._since: float | None = None
        """When the fault began that lasts; None: there is none."""

    @property
    def seconds(self) -> float:
        """Since the agents began."""
        return time.perf_counter() - self._started

    def is_disturbed(self, since_s: float) -> bool:
        """Whether a fault lasts, or has lasted at any time since then."""
        last = self.findings.faults[-1].ended_s + GRACE_S if self.findings.faults else 0.0
        return self._since is not None or last > since_s

    @contextmanager
    def disturbed(self, name: str) -> Iterator[list[str]]:
        """Around a fault. The block appends words on what came of it to the list."""
        began_s, words = self.seconds, list[str]()
        self._since = began_s
        try:
            yield words
        finally:
            self.findings.faults.append(Fault(name, began_s, self.seconds, "; ".join(words)))
            self._since = None

    def failed(self, agent: str, action: str, sent_s: float, error: DjinnError) -> None:
        """A call that was sent at `sent_s` has failed now."""
        status, code = (error.status, error.code) if isinstance(error, APIError) else (None, None)
        is_moving = self._moves and code in MOVING
        if is_moving or (can_be_expected(error) and self.is_disturbed(sent_s)):
            self.findings.expected[code or type(error).__name__] += 1
            return
        what = " ".join(str(part) for part in (type(error).__name__, status, code) if part is not None)
        self._note(agent, action, what, error.message, error.request_id)

    def lost(self, agent: str, action: str, what: str) -> None:
        """Something is gone, or is not as the server said that it was."""
        self._note(agent, action, "Lost", what)

    def _note(self, agent: str, action: str, error: str, message: str, request: str | None = None) -> None:
        row: Row = {"second": self.seconds, "agent": agent, "action": action, "error": error, "message": message}
        self.findings.unexpected.append({**row, "request": request})

    def compared(
        self, agent: str, made: TokenIds | str, expected: TokenIds | str, *, tokens: int, position: int | None = None
    ) -> None:
        """An answer of so many tokens, beside the twin's."""
        self.findings.answers += 1
        self.findings.tokens += tokens
        if made != expected:
            answers = {"answer": f"{made}"[:SHOWN], "the twin's": f"{expected}"[:SHOWN]}
            self.findings.wrong.append({"second": self.seconds, "agent": agent, "position": position, **answers})

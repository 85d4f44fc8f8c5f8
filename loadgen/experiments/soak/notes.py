"""What agents write down while they run: answers, and errors that a fault explains or does not."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from client.errors import APIError, Conflict, ConnectionFailed, ConnectionLost, DjinnError, RateLimited
from loadgen.experiments.soak.findings import Fault, Findings, Unexpected, WrongAnswer
from loadgen.load.prompts import TokenIds

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
    }
)


def can_be_expected(error: DjinnError) -> bool:
    """Whether a fault can be the cause: the server is away, or says that it is, or has lost a pause or not yet ended a
    turn whose client is gone.
    """
    if isinstance(error, ConnectionFailed | ConnectionLost | RateLimited | Conflict):
        return True
    return isinstance(error, APIError) and error.code in EXPECTED_CODES


class Notes:
    """Writes findings on a clock that starts with it."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
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
        if can_be_expected(error) and self.is_disturbed(sent_s):
            self.findings.expected[(isinstance(error, APIError) and error.code) or type(error).__name__] += 1
            return
        status, code = (error.status, error.code) if isinstance(error, APIError) else (None, None)
        kind, told = type(error).__name__, error.message
        self.findings.unexpected.append(
            Unexpected(agent, self.seconds, action, kind, status, code, told, error.request_id)
        )

    def lost(self, agent: str, action: str, what: str) -> None:
        """Something is gone, or is not as the server said that it was."""
        self.findings.unexpected.append(Unexpected(agent, self.seconds, action, "Lost", None, None, what, None))

    def compared(
        self, agent: str, made: TokenIds | str, expected: TokenIds | str, *, tokens: int, position: int | None = None
    ) -> None:
        """An answer of so many tokens, beside the twin's."""
        self.findings.answers += 1
        self.findings.tokens += tokens
        if made != expected:
            self.findings.wrong.append(WrongAnswer(agent, self.seconds, position, made, expected))

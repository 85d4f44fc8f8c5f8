"""What the experiment does, decided before it runs, and what was seen: answers, and errors that a fault explains or
does not. Times in seconds since the agents began.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from client.errors import APIError, Conflict, ConnectionFailed, ConnectionLost, DjinnError, RateLimited
from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.prompts import TokenIds
from loadgen.plans import option
from loadgen.report.report import Failure
from loadgen.report.tables import Row

SERVER_FAULTS = (
    "kill of the engine",
    "kill of the server",
    "end of the server",
    "damaged KV",
    "full disk",
    "cancelled streams",
)
"""In every round of so many faults each comes once."""
CLUSTER_FAULTS = ("kill of a replica", "end of a replica", "cancelled streams")
"""The same, where there are replicas."""
MOST_REPLICAS = 64
SPREAD = 0.2
"""The time between two faults is the plan's, give or take this share."""
LONGEST_PROMPT = 40
"""Tokens of a turn's prompt."""
FEWEST_TURNS = 2
"""Of a session, before it is full."""
FIRST_TOKEN, LAST_TOKEN = 20, 200
"""Prompts are of these token ids: every vocabulary has them, and they are not special."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """For `minutes` minutes, `agents` agents take turns of `tokens` tokens. Their sessions end at `context` tokens.
    About every `every` seconds a fault comes. With `replicas` the server is a cluster of so many, and an operator moves
    `moves_per_second` sessions.

    Raises `LoadgenError` if a value is outside its range.
    """

    minutes: float = option(60.0, "how long agents run")
    agents: int = option(8, "agents at once")
    context: int = option(512, "tokens of a session, before another is opened")
    tokens: int = option(12, "tokens generated in each turn, greedily")
    every: float = option(25.0, "seconds between two faults, about")
    seed: int = option(0, "of prompts, actions and faults")
    replicas: int = option(0, "of a cluster in place of the server")
    moves_per_second: float = option(0.0, "sessions that an operator moves between replicas")
    standby: bool = option(False, "start the cluster with --standby: killed replicas return sooner")

    def __post_init__(self) -> None:
        require_at_least(1, self, "agents", "tokens")
        require_at_least(0, self, "seed", "replicas")
        require_at_least(FEWEST_TURNS * self.longest_turn, self, "context")
        for name in ("minutes", "every"):
            if not 0 < getattr(self, name) < float("inf"):
                raise LoadgenError(f"{name} must be a number above 0")
        if self.replicas > MOST_REPLICAS:
            raise LoadgenError(f"replicas must be at most {MOST_REPLICAS}, not {self.replicas}")
        if not 0 <= self.moves_per_second < float("inf"):
            raise LoadgenError("moves_per_second must be at least 0 and finite")
        if self.moves_per_second and self.replicas < 2:
            raise LoadgenError("moves_per_second needs replicas: at least 2")
        if self.standby and not self.replicas:
            raise LoadgenError("standby needs replicas")

    @property
    def seconds(self) -> float:
        """How long the agents run."""
        return 60 * self.minutes

    @property
    def longest_turn(self) -> int:
        """Tokens that a turn adds at most."""
        return LONGEST_PROMPT + self.tokens

    @property
    def faults(self) -> tuple[str, ...]:
        """The kinds that come."""
        return CLUSTER_FAULTS if self.replicas else SERVER_FAULTS

    def timetable(self) -> Iterator[tuple[float, str]]:
        """Without end: the seconds to wait, and the fault that comes then."""
        choose = random.Random(self.seed)
        while True:
            for name in choose.sample(self.faults, len(self.faults)):
                yield self.every * choose.uniform(1 - SPREAD, 1 + SPREAD), name


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the server. `ended_s` is when it was ready again; `detail` says what came of it."""

    name: str
    began_s: float
    ended_s: float
    detail: str


@dataclass(slots=True)
class Findings:
    """Everything seen. `expected` counts errors while a fault lasted or a session moved, `actions` what agents
    completed, `skipped` says which faults could not be made, and why. `answers` of `tokens` tokens in all were compared
    with the twin's; `wrong` and `unexpected` have a row for each of them that was. `first_s` are times to the first
    token of streamed turns. `samples` say what the server uses.

    Of a cluster: `moved` sessions, `refused` moves by code, `owners` counts sessions by how many replicas have them,
    and `routes` turns by the way that they came to their owners.
    """

    duration_s: float = 0.0
    answers: int = 0
    tokens: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: list[Row] = field(default_factory=list)
    unexpected: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    moved: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    owners: Counter[int] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


GRACE_S = 3.0
"""A fault explains errors for so long after the server is ready: a call may have waited for it until then."""
_STARTING = {"engine_restarting", "engine_stalled", "draining", "connection_limit"}
_UNREACHED = {"journal_unavailable", "not_durable", "disk_full", "replica_away", "replica_lost", "directory_away"}
EXPECTED_CODES = frozenset(_STARTING | _UNREACHED)
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

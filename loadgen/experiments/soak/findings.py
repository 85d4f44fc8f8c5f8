"""What was seen, as it was seen. Times in seconds since the agents began."""

from collections import Counter
from dataclasses import dataclass, field

from loadgen.load.prompts import TokenIds
from loadgen.results.failures import Failure


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the server. `ended_s` is when it was ready again; `detail` says what came of it."""

    name: str
    began_s: float
    ended_s: float
    detail: str


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """An answer that the twin does not give. `position` is where in the session's history the answer began, None of a
    chat; `made` and `expected` are token ids, or what a chat called.
    """

    agent: str
    at_s: float
    position: int | None
    made: TokenIds | str
    expected: TokenIds | str


@dataclass(frozen=True, slots=True)
class Unexpected:
    """An error that no fault explains, or something that is gone. `request_id` is the server's, None without one."""

    agent: str
    at_s: float
    action: str
    kind: str
    status: int | None
    code: str | None
    message: str
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment: bytes of resident memory and open descriptors of all of its processes, bytes in its
    state folder, and its open sessions, None while it does not say.
    """

    at_s: float
    rss_bytes: int
    descriptors: int
    state_bytes: int
    sessions: int | None


@dataclass(slots=True)
class Findings:
    """Everything seen. `expected` counts errors while a fault lasted, `actions` what agents completed, `skipped` says
    which faults could not be made, and why. `answers` of `tokens` tokens in all were compared with the twin's.
    """

    duration_s: float = 0.0
    answers: int = 0
    tokens: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: list[WrongAnswer] = field(default_factory=list)
    unexpected: list[Unexpected] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

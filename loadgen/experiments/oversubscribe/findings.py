"""What was seen of one target, as it was seen. Times in seconds since the start of the run."""

from dataclasses import dataclass, field

from loadgen.load.prompts import TokenIds
from loadgen.results.failures import Failure


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of KV that each tier has room for, and what a block takes and holds; `policy` is the server's."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    block_bytes: int
    block_tokens: int
    policy: str

    def demand(self, tokens: int) -> int:
        """Bytes of KV that a session of so many tokens has, in whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_bytes


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The server's memory at one moment. `demand_bytes` is what the histories of all sessions come to, wherever their
    KV is. `device_bytes` is all that is in use there: held by sessions, or kept because it may be used again. The
    lower tiers' are what sessions hold there; a copy of what is on the device too counts in both.
    """

    at_s: float
    demand_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class GrownTurn:
    """A completed turn. `token_ids` are what it generated."""

    session: int
    turn: int
    sent_s: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class TurnFailure:
    """A turn that did not complete; its session's later ones are not run. `kind` is the name of the error's class."""

    session: int
    turn: int
    at_s: float
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Check:
    """A session answered again, alone and with nothing of it in any cache: `crowded` is what it said among all others,
    `alone` what it says by itself.
    """

    session: int
    crowded: TokenIds
    alone: TokenIds

    @property
    def matching(self) -> int:
        """How many tokens are the same."""
        return sum(one == other for one, other in zip(self.crowded, self.alone, strict=False))


@dataclass(slots=True)
class Findings:
    """Everything seen of one target, in order of time. It grows as the run goes on."""

    budget: Budget | None = None
    duration_s: float = 0.0
    samples: list[MemorySample] = field(default_factory=list)
    turns: list[GrownTurn] = field(default_factory=list)
    turn_failures: list[TurnFailure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

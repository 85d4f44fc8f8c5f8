"""What was seen of one target, as it was seen."""

from dataclasses import dataclass, field
from enum import StrEnum

from loadgen.results.failures import Failure


class Way(StrEnum):
    """How the model comes to stand where it was."""

    RECOMPUTE = "recompute"
    """A fresh session is sent the whole history, and computes it up to the layer."""
    OFFLOAD = "hand-written offload"
    """A script copies the KV from host memory back to where attention reads it, and the residual stream."""
    DJINN = "Djinn"
    """The paused session is called back from the host tier."""


@dataclass(frozen=True, slots=True)
class ServerSplit:
    """What the server tells of one resume from the host tier, in seconds: the dispatch of the command, the copy of the
    KV, and the way back of the residual stream. None where it does not tell.
    """

    dispatch_s: float | None
    copy_s: float
    checkpoint_s: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One way back to after `layer` of a history of `length` tokens.

    `standing_s`: until the model stands there with all KV in place. `token_s`: from the start until the next token
    `token_id`, which the hand-written offload does not have without a model. `bytes`: of KV that were brought back, or
    recomputed.
    """

    way: Way
    length: int
    layer: int
    repeat: int
    standing_s: float
    token_s: float | None
    token_id: int | None
    bytes: int
    split: ServerSplit | None = None


@dataclass(slots=True)
class Findings:
    """Everything seen of one target, in order of time. It grows as the run goes on.

    `passes` has for each length the first position of the pass that pauses: the positions before it have gone through
    all layers. `offload` says what the hand-written offload ran on.
    """

    passes: dict[int, int] = field(default_factory=dict)
    offload: str = ""
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

"""What was seen, as it was seen."""

from dataclasses import dataclass, field
from enum import StrEnum

from loadgen.results.failures import Failure


class Way(StrEnum):
    """Who computes with weights that are not on the device."""

    STREAMED = "Djinn, streamed"
    RESIDENT = "Djinn, resident"
    """With all weights on the device: what streaming is held against."""
    DOUBLE_BUFFER = "hand-written double buffer"
    ACCELERATE = "Accelerate"
    PLAIN = "plain copies"
    """Of what the double buffer streams in a pass, and nothing else: no way gets weights faster."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch in one way. What a way does not have is None.

    `first_s`: until every session has its first token. `tokens_per_s`: of all together, from then on. `bytes_per_s`: of
    weights that came to the device meanwhile. `answer`: a hash of what was said.
    """

    way: Way
    batch: int
    cold: bool
    repeat: int
    first_s: float | None = None
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One session on a server that copies weights in pieces of `chunk_bytes`."""

    chunk_bytes: int
    repeat: int
    first_s: float
    tokens_per_s: float
    bytes_per_s: float


@dataclass(slots=True)
class Findings:
    """Everything seen, in order of time. It grows as the run goes on.

    `streamed_bytes`: what each way brings to the device in a pass. `counted_bytes`: the same of Djinn by its own count,
    over the passes of one turn. `device`: what kind the baselines ran on; `facts` are what else is to be known of them.
    """

    samples: list[Sample] = field(default_factory=list)
    chunks: list[ChunkSample] = field(default_factory=list)
    streamed_bytes: dict[Way, int] = field(default_factory=dict)
    counted_bytes: float | None = None
    device: str = ""
    facts: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

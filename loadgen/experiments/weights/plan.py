"""What the experiment does, the servers that it starts, and what one of its samples is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.weights.sizes import ModelBytes
from loadgen.peers.base import ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.serving import ManagedTarget
from loadgen.plans import option
from loadgen.report.text import MIB

SPARE_TOKENS = 32
"""Of each session: blocks have 16 tokens."""
LEAST_PROMPT = 2
FEWEST_TOKENS = 2
"""The first is no decode step."""
LEAST_STEP_TOKENS = 512
"""The server's own default."""


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
class Cell:
    """So many sessions at once; `cold`: with nothing of the weights' files in the page cache."""

    batch: int
    cold: bool = False

    def __str__(self) -> str:
        sessions = "1 session" if self.batch == 1 else f"{self.batch} sessions"
        return f"{sessions}, cold" if self.cold else sessions

    @property
    def ways(self) -> tuple[Way, ...]:
        """Those that take part in it: where a disk is waited for, those that read from one."""
        return tuple(way for way in Way if not self.cold or way is not Way.RESIDENT)


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """How much is measured: each of `batches`, which share out `prompt` tokens of text and generate `tokens` tokens a
    session, `repeats` times in every way. The smallest also `cold`. `chunks` are the sizes of a sweep, in bytes.

    Raises `LoadgenError` if a value is outside its range.
    """

    batches: tuple[int, ...] = option((1, 8, 32), "sessions at once", quick=(1, 8))
    prompt: int = option(1024, "tokens of prompt that the sessions of a batch share out", quick=128)
    tokens: int = option(32, "tokens generated in each session", quick=8)
    repeats: int = option(5, "how often each way is measured", quick=2)
    cold: bool = option(False, "the smallest batch also with weights that come from the disk")
    chunks: tuple[int, ...] = tuple(size * MIB for size in (16, 32, 64, 128, 256, 512))
    seed: int = option(0, "of texts")

    def __post_init__(self) -> None:
        for name in ("batches", "chunks"):
            values = getattr(self, name)
            if min(values, default=0) < 1 or len(set(values)) < len(values):
                raise LoadgenError(f"{name} must be different numbers from 1")
        if self.prompt < (least := LEAST_PROMPT * max(self.batches)):
            raise LoadgenError(f"prompt must be at least {least}: {LEAST_PROMPT} tokens for each session of a batch")
        require_at_least(FEWEST_TOKENS, self, "tokens")
        require_at_least(1, self, "repeats")
        require_at_least(0, self, "seed")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All of them, in the order in which they are measured."""
        cold = (Cell(min(self.batches), cold=True),) if self.cold else ()
        return (*(Cell(batch) for batch in self.batches), *cold)

    def prompt_tokens(self, batch: int) -> int:
        """Of each session of a batch: all batches have as much text to compute before their first tokens."""
        return self.prompt // batch

    @property
    def kv_tokens(self) -> int:
        """Room for the largest batch at its end, each session with a block that is partly filled, and one to spare."""
        return max((self.prompt_tokens(batch) + self.tokens + SPARE_TOKENS) * (batch + 1) for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch in one way. What a way does not have is None.

    `first_s`: until every session has its first token. `tokens_per_s`: of all together, from then on. `bytes_per_s`: of
    weights that came to the device meanwhile. `answer`: a hash of what was said.
    """

    way: Way
    cell: Cell
    repeat: int
    first_s: float | None = None
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """`budget` bytes of weights may be on the device. `folder` is a scratch folder on a disk."""

    settings: ServerSettings
    model_bytes: ModelBytes
    budget: int
    folder: Path

    def servers(self, plan: WeightsPlan) -> list[ManagedTarget]:
        """Djinn with its weights streamed, and with all of them on the device."""
        flags = {"--weights-device": str(self.budget)}
        return [self._server("djinn-streamed", plan, flags), self._server("djinn-resident", plan, {})]

    def chunked_servers(self, plan: WeightsPlan) -> list[ManagedTarget]:
        """Djinn with its weights streamed, in copies of each size."""
        flags = {"--weights-device": str(self.budget)}
        return [self._server(f"djinn-chunk-{size}", plan, {**flags, "--chunk-size": str(size)}) for size in plan.chunks]

    def for_programs(self) -> Mapping[str, Any]:
        """What the programs beside the servers are told."""
        return {
            "model": str(self.settings.model),
            "dtype": self.settings.dtype,
            "budget_bytes": self.budget,
            "folder": str(self.folder),
        }

    def weight_files(self) -> Iterator[Path]:
        """All files that anybody here reads weights from."""
        yield from self.settings.model.glob("*.safetensors")
        yield from (path for path in self.folder.rglob("*") if path.is_file())

    def _server(self, name: str, plan: WeightsPlan, flags: Mapping[str, str]) -> ManagedTarget:
        """A pass computes a whole prompt or a token of each session. A CPU's file lies in the scratch folder."""
        common = {
            "--max-step-tokens": str(max(plan.prompt, LEAST_STEP_TOKENS)),
            "--max-draft-tokens": "0",
            "--cache-dir": str(self.folder / "cache"),
        }
        return ManagedTarget(name, DjinnPeer(name, policy="signal", flags={**common, **flags}), self.settings)


def in_turn(ways: Sequence[Way], turn: int) -> tuple[Way, ...]:
    """The ways for one cell: each is first as often as the others, so that what drifts falls on all alike."""
    return (*ways[turn % len(ways) :], *ways[: turn % len(ways)])

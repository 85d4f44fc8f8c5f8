"""How large copies of weights should be: a server for each size, in turns, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loadgen.experiments.weights.findings import ChunkSample, Findings
from loadgen.experiments.weights.generation import ask_djinn
from loadgen.experiments.weights.plan import WeightsPlan
from loadgen.experiments.weights.setup import Setup
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import fresh_prompts
from loadgen.results.failures import noting
from loadgen.results.spread import Spread
from loadgen.targets.subject import Subject

NEAR_BEST = 0.98
"""Of the best bandwidth: what is above that is as good, as far as one can tell."""


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One size of copies."""

    chunk_bytes: int
    first_s: Spread
    tokens_per_s: Spread
    bytes_per_s: Spread


@dataclass(frozen=True, slots=True)
class Choice:
    """The size to take: of those whose bandwidth is near the best, the one with the earliest first token."""

    chunk_bytes: int
    share_of_best: float


async def measure_chunks(
    subjects: Mapping[int, Subject],
    setup: Setup,
    plan: WeightsPlan,
    corpus: Corpus,
    findings: Findings,
    advance: Callable[[], None],
) -> None:
    """One session at a time on each server, by the size of its copies. The first round, in which what is slow only once
    happens, is not kept. Raises `DjinnError`, `LoadgenError` if nothing can be measured.
    """
    sizes = list(subjects)
    for repeat in range(-1, plan.repeats):
        for place in range(len(sizes)):
            size = sizes[(place + repeat) % len(sizes)]
            with noting(f"copies of {size:,} bytes", findings.failures):
                found = await _sample(subjects[size], size, repeat, setup, plan, corpus)
                if repeat >= 0:
                    findings.chunks.append(found)
            if repeat >= 0:
                advance()


async def _sample(
    subject: Subject, size: int, repeat: int, setup: Setup, plan: WeightsPlan, corpus: Corpus
) -> ChunkSample:
    prompts = await fresh_prompts(1, plan.prompt, corpus, plan.seed, subject.tokenize)
    timed = (await ask_djinn(subject, prompts, plan.tokens)).timed()
    streamed = setup.model_bytes.per_pass - (await subject.memory()).text.kept_bytes
    return ChunkSample(size, repeat, timed.first_s, timed.tokens_per_s, streamed * timed.steps_per_s)


def chunk_rows(samples: Sequence[ChunkSample]) -> tuple[ChunkRow, ...]:
    """One for each size, the smallest first."""
    return tuple(_row([each for each in samples if each.chunk_bytes == size], size) for size in _sizes(samples))


def choose(rows: Sequence[ChunkRow]) -> Choice | None:
    """The size to take, by medians; None without any."""
    if not rows:
        return None
    best = max(row.bytes_per_s.median for row in rows)
    near = [row for row in rows if row.bytes_per_s.median >= NEAR_BEST * best]
    chosen = min(near, key=lambda row: row.first_s.median)
    return Choice(chosen.chunk_bytes, chosen.bytes_per_s.median / best)


def _sizes(samples: Sequence[ChunkSample]) -> list[int]:
    return sorted({sample.chunk_bytes for sample in samples})


def _row(samples: Sequence[ChunkSample], size: int) -> ChunkRow:
    return ChunkRow(
        size,
        Spread.over([sample.first_s for sample in samples]),
        Spread.over([sample.tokens_per_s for sample in samples]),
        Spread.over([sample.bytes_per_s for sample in samples]),
    )

"""The histories of all sessions: real text, and no two with a common beginning, so that no prefix cache helps."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.experiments.resume_latency.plan import Cell, ResumePlan, checked_cells, plan_cells
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, cut_prompts
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.workload import Load
from loadgen.targets.subject import Subject

PER_SAMPLE = 3
"""Of one cell in one repeat: two are recomputed, one is called back."""


@dataclass(frozen=True, slots=True)
class Histories:
    """What each session is sent. `warm_up` has one for each length, `offload` what the hand-written offload holds."""

    passers: tuple[TokenIds, ...]
    warm_up: dict[int, TokenIds]
    offload: dict[int, TokenIds]
    samples: dict[tuple[int, Cell], tuple[TokenIds, TokenIds, TokenIds]]


async def cut_histories(
    subject: Subject, plan: ResumePlan, layers: Sequence[int], passers: Sequence[int], corpus: Corpus
) -> Histories:
    """All of them, in tokens of the server's model. Raises `LoadgenError`, `DjinnError`.

    In the first repeat of a cell where answers are compared, the session that is called back has the history that the
    hand-written offload holds.
    """
    cells = plan_cells(plan.lengths, layers)
    per_sample = [cell.length for _ in range(plan.repeats) for cell in cells for _ in range(PER_SAMPLE)]
    lengths = [*passers, *plan.lengths, *per_sample]
    trace = tuple(AgentPlan(0.0, (TurnPlan(length, 1, None, None, tool=False),)) for length in lengths)
    load = Load(system_tokens=0, seed=plan.seed)
    cut = iter([turns[0] for turns in await cut_prompts(trace, load, corpus, subject.tokenize)])
    passing = tuple(next(cut) for _ in passers)
    warm_up = {length: next(cut) for length in plan.lengths}
    samples = {(repeat, cell): (next(cut), next(cut), next(cut)) for repeat in range(plan.repeats) for cell in cells}
    offload = {cell.length: samples[0, cell][-1] for cell in checked_cells(plan.lengths, layers)}
    return Histories(passing, warm_up, offload, samples)

"""From the raw record to figures, each with its target. Pure."""

from benchmarks.drafts.replay import Measured, Plan
from benchmarks.figures import Figure, Target
from benchmarks.spread import middle_half
from loadgen.results.spread import Spread

FASTER = Target(1.5, at_least=True)
NOT_SLOWER = Target(0.97, at_least=True)
SAME = Target(1, at_least=True)


def figures_of(plan: Plan, measured: Measured) -> list[Figure]:
    """The whole table. The ratio of all batches is that of their tokens and seconds together."""
    batches = measured.batches
    tokens = sum(batch.tokens for batch in batches)
    plain, drafting = sum(batch.plain.seconds for batch in batches), sum(batch.drafting.seconds for batch in batches)
    plain_cpu, drafting_cpu = sum(batch.plain.cpu_s for batch in batches), sum(b.drafting.cpu_s for b in batches)
    drafted, accepted = sum(b.drafts.drafted for b in batches), sum(b.drafts.accepted for b in batches)
    equal, turns = sum(batch.equal for batch in batches), sum(batch.turns for batch in batches)
    alone_and_greedy = plan.streams == 1 and not plan.temperature
    target = FASTER if alone_and_greedy else NOT_SLOWER
    ratios = [batch.plain.seconds / batch.drafting.seconds for batch in batches]
    return [
        Figure("Tokens per second without drafts", "tokens/s", _one(tokens / plain)),
        Figure("Tokens per second with drafts", "tokens/s", _one(tokens / drafting)),
        Figure("With drafts / without, all batches", "×", _one(plain / drafting), target),
        *([Figure("With drafts / without, by batch", "×", middle_half(ratios))] if len(ratios) > 1 else []),
        Figure("Tokens per CPU second, with drafts / without", "×", _one(plain_cpu / drafting_cpu)),
        Figure("Drafted tokens per token", "×", _one(drafted / tokens)),
        Figure("Accepted of the drafted tokens", "×", _one(accepted / max(1, drafted))),
        Figure("Tokens that cost no step of their own", "×", _one(accepted / tokens)),
        Figure("Answers that are the same", "×", _one(equal / turns), SAME),
    ]


def _one(value: float) -> Spread:
    return Spread(value, value, value, 1)

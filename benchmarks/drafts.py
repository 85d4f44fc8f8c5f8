"""`python -m benchmarks.drafts --runs FILE`: tokens per second with drafts and without, on recorded conversations."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch

from app.domain.memory_map import DraftCounts
from app.domain.values import SamplingParams
from app.gpu.models.base import LayerStack
from app.model_store.resolve import load_tokenizer
from app.text.tokenizer import Tokens
from benchmarks.command import OwnRun, bind_to_cores, exit_status, finish, make_parser
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import OnCpu, build, find_model, load_layers
from benchmarks.measuring import CpuMeter, middle_half
from loadgen.errors import NotAsMeant
from loadgen.report.tables import Figure, Target, exact


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """The `messages` of each line, with `role` and `content`. Raises `NotAsMeant` for another file."""
    try:
        return [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotAsMeant(f"{path} is no file of conversations: {error!r}") from error


def cut_contexts(messages: list[dict[str, str]], tokenizer: Tokens, *, turns: int, tokens: int) -> list[list[int]]:
    """What comes before `turns` messages of the assistant, drawn from those that have at most `tokens` tokens before
    them, the shortest first. Fewer if there are not so many.
    """
    ends = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    contexts = [tokenizer.render_chat(messages[:end]) for end in ends]
    fitting = [context for context in contexts if len(context) <= tokens]
    return sorted(random.Random(0).sample(fitting, min(turns, len(fitting))), key=len)


DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Plan:
    """`turns` of each of the first `conversations`, `streams` of which are answered at once: contexts of at most
    `context` tokens, answers of `tokens` tokens at `temperature`.
    """

    conversations: int
    turns: int
    streams: int
    context: int
    tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the clock, and of all cores: the latter say more on a machine that others use too."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Together:
    """Turns that were generated at once: their tokens, and what all but each one's first token cost."""

    tokens: int
    plain: Cost
    drafting: Cost
    equal: int
    """Turns whose tokens were the same with drafts and without."""
    turns: int
    drafts: DraftCounts


@dataclass(frozen=True, slots=True)
class Measured:
    """The raw record of a run.

    other_cpu_share: share, 0 to 1, of the benchmark's cores that processes outside it used.
    """

    batches: list[Together]
    other_cpu_share: float


def measure(model: Path, runs: Path, plan: Plan, cores: list[int]) -> Measured:
    """Runs everything. Raises `NotAsMeant` if the engine fails, or for a file without conversations that are short
    enough.
    """
    torch.set_num_threads(len(cores))
    tokenizer = Tokens(load_tokenizer(find_model(str(model))), frozenset())
    conversations = [
        cut_contexts(messages, tokenizer, turns=plan.turns, tokens=plan.context)
        for messages in read_conversations(runs)[: plan.conversations]
    ]
    if not any(conversations):
        raise NotAsMeant(
            f"{runs} has no context of at most {plan.context} tokens before an answer: --context is too small"
        )
    stack = load_layers(OnCpu(), str(model), DTYPE)
    with _engine(model, stack, plan, drafts=0) as plain, _engine(model, stack, plan, drafts=None) as drafting:
        meter = CpuMeter(cores, time.process_time)
        return Measured(list(_replay(plain, drafting, conversations, plan)), meter.other_share())


def _engine(model: Path, stack: LayerStack, plan: Plan, drafts: int | None) -> LiveEngine:
    return build(
        OnCpu(),
        str(model),
        stack,
        dtype=DTYPE,
        kv_device=f"{plan.streams + 1}x{plan.context + plan.tokens}",
        kv_policy="none",
        max_draft_tokens=drafts,
    )


def _replay(
    plain: LiveEngine, drafting: LiveEngine, conversations: list[list[list[int]]], plan: Plan
) -> Iterator[Together]:
    """Which engine is the first changes from batch to batch."""
    groups = [conversations[first : first + plan.streams] for first in range(0, len(conversations), plan.streams)]
    batches = [list(filter(None, batch)) for group in groups for batch in zip_longest(*group)]
    for number, batch in enumerate(batches):
        engines = [plain, drafting] if number % 2 else [drafting, plain]
        before = drafting.memory().drafts
        found = {engine: _generate(engine, batch, plan) for engine in engines}
        after = drafting.memory().drafts
        (plain_cost, wanted), (drafting_cost, answers) = found[plain], found[drafting]
        yield Together(
            tokens=sum(map(len, wanted)) - len(batch),
            plain=plain_cost,
            drafting=drafting_cost,
            equal=sum(answer == other for answer, other in zip(answers, wanted, strict=True)),
            turns=len(batch),
            drafts=DraftCounts(after.drafted - before.drafted, after.accepted - before.accepted),
        )


def _generate(live: LiveEngine, contexts: Sequence[Sequence[int]], plan: Plan) -> tuple[Cost, list[list[int]]]:
    """The tokens of each answer, and what they cost without the first one, which comes with the context."""
    sampling = SamplingParams(seed=0, temperature=plan.temperature)
    sessions = [live.open() for _ in contexts]
    firsts = [live.submit(session, context, 1, sampling) for session, context in zip(sessions, contexts, strict=True)]
    live.finish(*firsts)
    began, cpu_began = time.perf_counter(), time.process_time()
    turns = [live.submit(session, (), plan.tokens - 1, sampling) for session in sessions]
    live.finish(*turns)
    cost = Cost(time.perf_counter() - began, time.process_time() - cpu_began)
    live.close(*sessions)
    return cost, [first.token_ids + turn.token_ids for first, turn in zip(firsts, turns, strict=True)]


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
        exact("Tokens per second without drafts", "tokens/s", tokens / plain),
        exact("Tokens per second with drafts", "tokens/s", tokens / drafting),
        exact("With drafts / without, all batches", "×", plain / drafting, target),
        *([Figure("With drafts / without, by batch", "×", middle_half(ratios))] if len(ratios) > 1 else []),
        exact("Tokens per CPU second, with drafts / without", "×", plain_cpu / drafting_cpu),
        exact("Drafted tokens per token", "×", drafted / tokens),
        exact("Accepted of the drafted tokens", "×", accepted / max(1, drafted)),
        exact("Tokens that cost no step of their own", "×", accepted / tokens),
        exact("Answers that are the same", "×", equal / turns, SAME),
    ]


QUICK = 4
"""Conversations of a short run."""


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.drafts", __doc__)
    parser.add_argument("--runs", type=Path, required=True, help="JSON lines, each with `messages` of a conversation")
    parser.add_argument("--conversations", type=int, default=60, help="how many of them; default 60")
    parser.add_argument("--turns", type=int, default=2, help="answers of each conversation; default 2")
    parser.add_argument("--streams", type=int, default=1, help="answers at once; default 1")
    parser.add_argument("--context", type=int, default=3072, help="most tokens before an answer; default 3072")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer; default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    names = ("conversations", "turns", "streams", "context", "tokens", "temperature")
    plan = Plan(**{name: getattr(arguments, name) for name in names})
    plan = replace(plan, conversations=QUICK) if arguments.quick else plan
    measured = measure(arguments.model, arguments.runs, plan, bind_to_cores(arguments.cores))
    run = OwnRun(
        model=arguments.model.name,
        plan=plan,
        settings={"dtype": DTYPE},
        figures=figures_of(plan, measured),
        measured=measured,
    )
    title = f"Drafts, {plan.streams} at once, temperature {plan.temperature:g}"
    note = "Spreads are the middle half of the batches. All answers of a batch are generated at once."
    finish(arguments, "drafts", title, run, note)


if __name__ == "__main__":
    sys.exit(main())

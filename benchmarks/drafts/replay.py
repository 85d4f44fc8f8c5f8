"""The same contexts on two engines around one model, one of which drafts: in turns, on one machine."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from app.domain.memory_map import DraftCounts
from app.domain.values import SamplingParams
from app.gpu.models.base import LayerStack
from app.model_store.tokenizer import load_tokenizer
from app.text.tokenizer import Tokens
from benchmarks.cpu_meter import CpuMeter
from benchmarks.drafts.contexts import cut_contexts, read_conversations
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import build, find_model, load_layers
from loadgen.errors import NotAsMeant

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


@dataclass(frozen=True, slots=True)
class _Here:
    device: str = "cpu"
    trace: Path | None = None


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
    stack = load_layers(_Here(), str(model), DTYPE)
    with _engine(model, stack, plan, drafts=0) as plain, _engine(model, stack, plan, drafts=None) as drafting:
        meter = CpuMeter(cores, time.process_time)
        return Measured(list(_replay(plain, drafting, conversations, plan)), meter.other_share())


def _engine(model: Path, stack: LayerStack, plan: Plan, drafts: int | None) -> LiveEngine:
    return build(
        _Here(),
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

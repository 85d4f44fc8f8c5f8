"""Decode steps that are replayed in runs of layers, as something is done to a row between two of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import Action, Edit, EditOp, Pass, TensorData, When
from app.domain.memory_map import StepCounts
from app.gpu.attention.batch import Batch
from app.gpu.graphs.decode import DecodeLimits
from app.gpu.graphs.pieces import RECORD_AFTER
from app.gpu.graphs.recording import record_graphs
from app.gpu.graphs.runs import RunGraphs
from app.gpu.kv_pools.device import KVPool
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.programs.run import layer_by_layer
from app.messages import Disarm
from app.model_store.resolve import resolve
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.graphs.graph_models import CPU, tiny
from tests.gpu.graphs.recording import FakeRecorder, PaddedAttention
from tests.gpu.models.driving import Drive
from tests.gpu.models.oracle import build_model, expect, save_model, tiny_config
from tests.gpu.oracle import greedy_tokens
from tests.gpu.wrapping import WrappedStack

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")

DECODES = When(Pass.DECODE)
DOUBLE = (Edit(EditOp.SCALE, factor=2.0),)
LAYERS = 4


class Seen(WrappedStack):
    """Notes what runs by itself, and what in a replay."""

    def __init__(self, stack: LayerStack, recorder: FakeRecorder) -> None:
        super().__init__(stack)
        self.recorder = recorder
        self.replayed: list[int | str] = []
        self.eager: list[int | str] = []

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self._note("embed")
        return super().embed(token_ids, positions)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        self._note(index)
        return super().layer(index, hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        self._note("head")
        return super().head(hidden)

    def _note(self, what: int | str) -> None:
        (self.replayed if self.recorder.replaying else self.eager).append(what)


class Watching:
    """An engine that replays, with sessions that decode, the first of which is looked at."""

    def __init__(self, tiny: TinyModel, sessions: int, recorder: FakeRecorder | None = None) -> None:
        self.recorder = recorder or FakeRecorder()
        self.stack = Seen(tiny.stack, self.recorder)
        engine = replace(tiny, stack=self.stack).engine(recorder=self.recorder, max_draft_tokens=0)
        self.driver = BreakDriver(engine)
        self.sessions = [self.driver.open() for _ in range(sessions)]
        self.turns = [self.driver.begin(each, prompt(seed, 6), 60) for seed, each in enumerate(self.sessions)]
        self.driver.advance()

    def next_step(self) -> StepCounts:
        """How the next step ran; `stack` has what ran in it."""
        before = self.driver.engine._runner.counts()
        self.stack.replayed.clear()
        self.stack.eager.clear()
        self.recorder.replays = 0
        self.driver.advance()
        after = self.driver.engine._runner.counts()
        return StepCounts(after.replayed - before.replayed, after.in_runs - before.in_runs, after.eager - before.eager)

    def until_recorded(self) -> None:
        """Steps, until all that they need has been recorded: one part in each."""
        for _ in range(40):
            if self.next_step().in_runs:
                return
        raise AssertionError("no step is replayed in runs")


@pytest.mark.parametrize(("action", "edits"), [(Action.CAPTURE, ()), (Action.EDIT, DOUBLE)], ids=["captured", "edited"])
def test_a_step_with_a_watched_row_replays_all_but_what_is_done_there(
    tiny: TinyModel, action: Action, edits: tuple[Edit, ...]
) -> None:
    watching = Watching(tiny, 3)
    watching.driver.arm(watching.sessions[0], 2, action=action, when=DECODES, edits=edits)
    watching.until_recorded()
    for _ in range(3):
        assert watching.next_step() == StepCounts(in_runs=1)
        assert watching.stack.eager == []
        assert watching.stack.replayed == ["embed", 0, 1, 2, 3, "head"]
        assert watching.recorder.replays == 4  # layers 0 and 1, layer 2, layer 3, and the head
    watching.driver.do(Disarm(watching.driver.ticket(), watching.sessions[0]))
    assert watching.next_step() == StepCounts(replayed=1)
    watching.driver.settle(*watching.turns)
    for seed, turn in enumerate(watching.turns[1:], 1):
        assert turn.tokens == greedy_tokens(tiny.oracle, prompt(seed, 6), 60)


def test_a_part_is_recorded_in_the_third_step_that_wants_it_one_in_each_step(tiny: TinyModel) -> None:
    watching = Watching(tiny, 2)
    watching.driver.arm(watching.sessions[0], 2, action=Action.CAPTURE, when=DECODES)
    recorded = []
    for _ in range(RECORD_AFTER + 4):
        watching.next_step()
        recorded.append(watching.recorder.beside)
    assert recorded == [0] * (RECORD_AFTER - 1) + [1, 2, 3, 4, 4]


def test_others_get_a_token_in_every_step_while_one_pauses_rests_and_goes_on(tiny: TinyModel) -> None:
    watching = Watching(tiny, 3)
    driver, (paused, *others) = watching.driver, watching.turns
    driver.arm(watching.sessions[0], 1, when=DECODES)
    for _ in range(16):
        before = [len(turn.tokens) for turn in others]
        watching.next_step()
        assert [len(turn.tokens) for turn in others] == [each + 1 for each in before]
        if paused.paused:
            assert watching.next_step() == StepCounts(replayed=1), "only the others run"
            driver.resume(paused)
    assert watching.next_step() == StepCounts(in_runs=1)
    assert watching.stack.eager == []
    driver.do(Disarm(driver.ticket(), watching.sessions[0]))
    driver.run(paused)
    driver.settle(*others)
    for seed, turn in enumerate(watching.turns):
        assert turn.tokens == greedy_tokens(tiny.oracle, prompt(seed, 6), 60)


def look(driver: BreakDriver) -> tuple[list[list[int]], list[Tensor]]:
    """Sessions that are captured, steered, paused and left alone at once: their tokens, and what was seen of them."""
    sessions = [driver.open() for _ in range(9)]
    turns = [driver.begin(each, prompt(seed, 4 + seed), 24) for seed, each in enumerate(sessions)]
    steered = vector(1, 48).numpy().tobytes()
    add = Edit(EditOp.ADD, factor=0.5, vector=TensorData("float32", (48,), steered))
    driver.arm(sessions[0], 2, action=Action.CAPTURE, when=DECODES)
    driver.arm(sessions[1], 1, 3, action=Action.EDIT, when=DECODES, edits=(add,))
    driver.arm(sessions[2], 0, 3, when=DECODES)
    driver.arm(sessions[4], 1, action=Action.CAPTURE, when=When(Pass.DECODE, every=3))
    for session in sessions[5:7]:  # what is alike is done at once, but for what sums over a position
        driver.arm(session, 1, 3, action=Action.EDIT, when=DECODES, edits=(add, *DOUBLE))
    for session in sessions[7:]:
        driver.arm(session, 1, action=Action.EDIT, when=DECODES, edits=(replace(add, op=EditOp.CLAMP),))
    seen = []
    while not all(turn.rests and not turn.paused for turn in turns):
        driver.advance()
        if turns[2].paused:
            seen.append(driver.read(turns[2]))
            driver.resume(turns[2])
    captures = [each for session in (sessions[0], sessions[4]) for each in driver.captures(session).records]
    return [turn.tokens for turn in turns], seen + [tensor_of(each.tensor) for each in captures]


def test_bits_are_those_of_steps_that_run_layer_by_layer(tiny: TinyModel) -> None:
    replayed = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0))
    tokens, seen = look(replayed)
    assert replayed.engine._runner.counts().in_runs > 20
    eager = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0))
    eager.engine._runner._runs = None
    wanted_tokens, wanted = look(eager)
    assert tokens == wanted_tokens
    assert len(seen) == len(wanted) > 50
    assert all(map(torch.equal, seen, wanted))


class Fails(FakeRecorder):
    """Records whole steps only."""

    def record(self, work: Callable[[], None], *, beside: bool = False) -> Callable[[], None]:
        if beside:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().record(work)


def test_where_no_part_can_be_recorded_steps_go_on_without_and_the_log_says_why(
    tiny: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    driver = BreakDriver(tiny.engine(recorder=Fails(), max_draft_tokens=0))
    session = driver.open()
    turn: Turn = driver.begin(session, prompt(3, 6), 20)
    driver.arm(session, 2, action=Action.CAPTURE, when=DECODES)
    with caplog.at_level(logging.WARNING):
        driver.settle(turn)
    assert turn.tokens == greedy_tokens(tiny.oracle, prompt(3, 6), 20)
    [message] = [each.getMessage() for each in caplog.records if "recorded" in each.getMessage()]
    assert message == "no more runs of layers are recorded: OutOfMemoryError: CUDA out of memory."


class Errs(FakeRecorder):
    """The second part that it records gives other numbers."""

    hidden: Tensor
    """What parts leave their results in."""

    def record(self, work: Callable[[], None], *, beside: bool = False) -> Callable[[], None]:
        replay = super().record(work, beside=beside)
        if self.beside != 2:
            return replay

        def err() -> None:
            replay()
            self.hidden.mul_(1.1)

        return err


def test_a_part_that_is_recorded_wrongly_is_found_before_a_row_goes_on_from_it(
    tiny: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Errs()
    watching = Watching(tiny, 2, recorder)
    runs = watching.driver.engine._runner._runs
    assert isinstance(runs, RunGraphs)
    recorder.hidden = runs.hidden
    watching.driver.arm(watching.sessions[0], 1, action=Action.CAPTURE, when=DECODES)
    with caplog.at_level(logging.WARNING):
        watching.driver.settle(*watching.turns)
    assert watching.driver.engine._runner.counts().in_runs == 0
    for seed, turn in enumerate(watching.turns):
        assert turn.tokens == greedy_tokens(tiny.oracle, prompt(seed, 6), 60)
    [message] = [each.getMessage() for each in caplog.records if "recorded" in each.getMessage()]
    assert message.startswith("no more runs of layers are recorded: stages 2 to 4 give other numbers")


@pytest.mark.parametrize("case", ["qwen2-window", "gpt2", "gemma2", "phi3", "mixtral"])
@torch.inference_mode()
def test_every_kind_of_model_can_be_cut_anywhere(case: str, tmp_path: Path) -> None:
    """Rows leave and join between any two layers, in a place of their own each."""
    oracle = build_model(tiny_config(case))
    resolved = resolve(str(save_model(oracle, tmp_path)), cache_dir=tmp_path)
    stack = load_stack(resolved, device=CPU, dtype=torch.float32, attention=PaddedAttention())
    sequences, layers = [torch.arange(5, 25), torch.arange(30, 45), torch.arange(40, 58)], stack.num_layers
    drive = Drive(stack, sequences)
    pool, recorder = KVPool(stack, len(drive.pool), BLOCK), FakeRecorder()
    whole = record_graphs(stack, pool, DecodeLimits(3, 8, stack.vocab_size), recorder)
    assert whole is not None
    runs = RunGraphs(stack, layer_by_layer(stack, pool), whole, recorder)
    drive.pool = pool.data.copy_(drive.pool)
    drive.run([{0: 9, 1: 1, 2: 7}])
    wanted = [expect(oracle, tokens) for tokens in sequences]
    for cut in [*range(1, layers + 1)] * 2:
        _, batch, token_ids = drive.begin({0: 1, 1: 1, 2: 1})
        at = [done - 1 for done in drive.done]
        runs.take(token_ids, batch, torch.tensor([1]))
        runs.run(0, cut)
        hidden = runs.hidden.clone()
        for row in (0, 2):
            assert torch.allclose(hidden[row], wanted[row].boundaries[cut][at[row]], atol=1e-3, rtol=1e-4)
        runs.take(token_ids, batch, torch.tensor([0, 2]))
        runs.run(0, cut)
        assert torch.allclose(runs.hidden[1], wanted[1].boundaries[cut][at[1]], atol=1e-3, rtol=1e-4)
        runs.hidden[0], runs.hidden[2] = hidden[0], hidden[2]
        runs.take(token_ids, batch, None)
        if cut < layers:
            runs.run(cut, layers)
        logits, _ = runs.head()
        for row in range(3):
            assert torch.allclose(logits[row], wanted[row].logits[at[row]], atol=1e-3, rtol=1e-4)
        runs.record()
    assert recorder.beside

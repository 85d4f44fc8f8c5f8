"""Decode steps that are replayed, with a recorder that needs no device: whole, or in runs of layers where a row is
watched. They keep few graphs, and where none can be recorded the log says why.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import Action, Edit, EditOp, Pass, TensorData, When
from app.domain.errors import FieldOutOfRange
from app.domain.memory_map import StepCounts
from app.domain.points import Point
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.kv.pools import KVPool
from app.gpu.models import load_stack
from app.gpu.startup.loader import choose_recorder, record_graphs
from app.messages import Disarm
from app.model_store.resolve import resolve
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.forward.recording import CPU, FakeRecorder, PaddedAttention, tiny, with_attention
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.models.driving import Drive
from tests.gpu.models.oracle import build_model, expect, save_model, tiny_config
from tests.gpu.tiny_engine import greedy_tokens

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")

DECODES = When(Pass.DECODE)
DOUBLE = (Edit(EditOp.SCALE, factor=2.0),)


class Watching:
    """An engine that replays, with sessions that decode, the first of which is looked at."""

    def __init__(self, tiny: TinyModel, sessions: int, recorder: FakeRecorder | None = None) -> None:
        self.recorder = recorder or FakeRecorder()
        self.driver = BreakDriver(tiny.engine(recorder=self.recorder, max_draft_tokens=0))
        self.sessions = [self.driver.open() for _ in range(sessions)]
        self.turns = [self.driver.begin(each, prompt(seed, 6), 60) for seed, each in enumerate(self.sessions)]
        self.driver.advance()

    def next_step(self) -> StepCounts:
        """How the next step ran."""
        before = self.driver.memory().steps
        self.recorder.replays = 0
        self.driver.advance()
        after = self.driver.memory().steps
        return StepCounts(after.replayed - before.replayed, after.in_runs - before.in_runs, after.eager - before.eager)

    def until_recorded(self) -> None:
        """Steps, until all that they need has been recorded: one part in each."""
        for _ in range(40):
            if self.next_step().in_runs:
                return
        raise AssertionError("no step is replayed in runs")


def test_what_is_done_inside_a_layer_is_the_same_beside_graphs(tiny: TinyModel) -> None:
    """Captures, edits and a pause in the first layer; and what others say stays."""

    def run(recorder: FakeRecorder | None) -> list[Any]:
        driver = BreakDriver(tiny.engine(recorder=recorder, max_draft_tokens=0))
        others = [driver.begin(driver.open(), prompt(seed, 6), 30) for seed in range(2)]
        watched = driver.open()
        for point in (Point.Q, Point.PATTERN, Point.RESID_MID, Point.MLP_POST):
            driver.arm(watched, 2, action=Action.CAPTURE, when=DECODES, point=point)
        driver.arm(watched, 1, action=Action.EDIT, edits=DOUBLE, when=DECODES, point=Point.Z)
        driver.arm(watched, 0, when=When(Pass.DECODE, every=4), point=Point.MLP_OUT)
        turn = driver.begin(watched, prompt(9, 6), 24)
        pauses = driver.run(turn)
        driver.settle(*others)
        kept = [
            (record.point, record.positions, tensor_of(record.tensor)) for record in driver.captures(watched).records
        ]
        return [len(pauses), turn.tokens, [other.tokens for other in others], kept]

    *found, captured = run(FakeRecorder())
    *expected, wanted = run(None)
    assert found == expected
    assert found[0] == 6
    for (point, positions, tensor), (other, there, kept) in zip(captured, wanted, strict=True):
        assert (point, positions) == (other, there)
        torch.testing.assert_close(tensor, kept)


@pytest.mark.parametrize(("action", "edits"), [(Action.CAPTURE, ()), (Action.EDIT, DOUBLE)], ids=["captured", "edited"])
def test_a_step_with_a_watched_row_replays_all_but_what_is_done_there(
    tiny: TinyModel, action: Action, edits: tuple[Edit, ...]
) -> None:
    watching = Watching(tiny, 3)
    watching.driver.arm(watching.sessions[0], 2, action=action, when=DECODES, edits=edits)
    watching.until_recorded()
    for _ in range(3):
        assert watching.next_step() == StepCounts(in_runs=1)
        assert watching.recorder.replays == 4  # layers 0 and 1, layer 2, layer 3, and the head
    watching.driver.do(Disarm(watching.driver.ticket(), watching.sessions[0]))
    assert watching.next_step() == StepCounts(replayed=1)
    watching.driver.settle(*watching.turns)
    for seed, turn in enumerate(watching.turns[1:], 1):
        assert turn.tokens == greedy_tokens(tiny.oracle, prompt(seed, 6), 60)


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
    assert replayed.memory().steps.in_runs > 20
    eager = BreakDriver(tiny.engine(max_draft_tokens=0))
    wanted_tokens, wanted = look(eager)
    assert tokens == wanted_tokens
    assert len(seen) == len(wanted) > 50
    assert all(map(torch.equal, seen, wanted))


class Fails(FakeRecorder):
    """Records whole steps only."""

    def record(self, work: Callable[[], None], *, concurrent: bool = False) -> Callable[[], None]:
        if concurrent:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().record(work)


@pytest.mark.parametrize(
    ("recorder", "says"),
    [(Fails(), "OutOfMemoryError: CUDA out of memory."), (FakeRecorder(wrong=2), "stages 2 to 4 give other numbers")],
    ids=["cannot", "wrong"],
)
def test_where_a_part_cannot_be_recorded_or_comes_out_wrong_steps_go_on_without_and_the_log_says_why(
    tiny: TinyModel, recorder: FakeRecorder, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    watching = Watching(tiny, 2, recorder)
    watching.driver.arm(watching.sessions[0], 1, action=Action.CAPTURE, when=DECODES)
    with caplog.at_level(logging.WARNING):
        watching.driver.settle(*watching.turns)
    assert watching.driver.memory().steps.in_runs == 0
    for seed, turn in enumerate(watching.turns):
        assert turn.tokens == greedy_tokens(tiny.oracle, prompt(seed, 6), 60)
    [message] = [each.getMessage() for each in caplog.records if "recorded" in each.getMessage()]
    assert message.startswith(f"no more runs of layers are recorded: {says}")


@pytest.mark.parametrize("case", ["qwen2-window", "gpt2", "gemma2", "phi3", "mixtral"])
@torch.inference_mode()
def test_every_kind_of_model_can_be_cut_anywhere(case: str, tmp_path: Path) -> None:
    """Rows leave and join between any two layers, in a place of their own each."""
    oracle = build_model(tiny_config(case))
    resolved = resolve(str(save_model(oracle, tmp_path)), cache_dir=tmp_path)
    stack = load_stack(resolved, device=CPU, dtype=torch.float32, attention=PaddedAttention())
    sequences, layers = [torch.arange(5, 25), torch.arange(30, 45), torch.arange(40, 58)], stack.num_layers
    drive = Drive(stack, sequences)
    pool, recorder = KVPool(stack, len(drive.pool.data), BLOCK), FakeRecorder()
    graphs = record_graphs(stack, pool, 3, 8, recorder)
    assert graphs is not None
    pool.data.copy_(drive.pool.data)
    drive.pool = pool
    drive.run([{0: 9, 1: 1, 2: 7}])
    wanted = [expect(oracle, tokens) for tokens in sequences]
    for cut in [*range(1, layers + 1)] * 2:
        _, batch, token_ids = drive.begin({0: 1, 1: 1, 2: 1})
        at = [done - 1 for done in drive.done]
        graphs.take(token_ids, batch, torch.tensor([1]))
        graphs.run(0, cut)
        hidden = graphs.hidden.clone()
        for row in (0, 2):
            assert torch.allclose(hidden[row], wanted[row].boundaries[cut][at[row]], atol=1e-3, rtol=1e-4)
        graphs.take(token_ids, batch, torch.tensor([0, 2]))
        graphs.run(0, cut)
        assert torch.allclose(graphs.hidden[1], wanted[1].boundaries[cut][at[1]], atol=1e-3, rtol=1e-4)
        graphs.hidden[0], graphs.hidden[2] = hidden[0], hidden[2]
        graphs.take(token_ids, batch, None)
        if cut < layers:
            graphs.run(cut, layers)
        graphs.run(layers, layers + 1)
        for row in range(3):
            assert torch.allclose(graphs.logits[row], wanted[row].logits[at[row]], atol=1e-3, rtol=1e-4)
        graphs.record_due()
    assert recorder.concurrent


LENGTHS = [3, 30, 9, 17, 5, 12, 40]


TILE = 256
"""Blocks that the kernel copies at once."""
BLOCKS = 2 * TILE + 5


def test_sessions_that_come_and_go_get_the_tokens_of_transformers(tiny: TinyModel) -> None:
    """Longer and shorter ones take each other's places, while prompts of others run."""
    driver, turns = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0)), []
    for seed, length in enumerate(LENGTHS + LENGTHS[:4]):
        start = prompt(seed, length)
        turns.append((start, driver.begin(driver.open(), start, 5 + seed)))
        driver.advance()
        driver.advance()
    driver.settle(*(turn for _, turn in turns))
    for start, turn in turns:
        assert turn.tokens == greedy_tokens(tiny.oracle, start, len(turn.tokens))
    assert driver.memory().steps.replayed > 20


def test_a_breakpoint_that_no_position_meets_costs_no_graph(tiny: TinyModel) -> None:
    driver, replayed = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0)), []
    session = driver.open()
    turn = driver.begin(session, prompt(1, 6), 12)
    driver.arm(session, 2, action=Action.CAPTURE, when=When(position=13))
    while not turn.rests:
        driver.advance()
        replayed.append(driver.memory().steps.replayed)
    assert replayed == [0, *range(1, 8), 7, *range(8, 11)]


class Remembers(PaddedAttention):
    """Takes what it has once read of a batch on the host, when that was first recorded, for what always holds."""

    def __init__(self) -> None:
        super().__init__()
        self._real: dict[int, Any] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        output = super().__call__(query, key, value, kv, batch, spec)
        if not batch.rows:
            real = self._real.setdefault(batch.decodes, batch.contexts.numpy() > 0)
            output.numpy()[~real] = 0
        return output


class Waits(PaddedAttention):
    """Looks at a number on the device while it computes."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        assert int(batch.contexts.max()) >= 0
        return super().__call__(query, key, value, kv, batch, spec)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [(ReferenceAttention(), "zip"), (Waits(), "cannot be recorded"), (Remembers(), "are off by")],
    ids=["needs-rows", "waits", "remembers"],
)
def test_a_model_that_cannot_be_recorded_runs_without_and_says_why(
    tiny: TinyModel, attention: Attention, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FakeRecorder()
    with caplog.at_level(logging.WARNING):
        driver = BreakDriver(with_attention(tiny, attention).engine(recorder=recorder, max_draft_tokens=0))
    [message] = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert message.startswith("decode steps run without CUDA graphs: ")
    assert reason in message
    assert recorder.recorded == 0
    turn = driver.turn(driver.open(), prompt(4, 9), 8)
    assert turn.tokens == greedy_tokens(tiny.oracle, prompt(4, 9), 8)


def test_graphs_that_are_asked_for_need_a_gpu() -> None:
    with pytest.raises(FieldOutOfRange, match="cuda_graphs: the device is cpu") as error:
        choose_recorder(True, CPU, streamed=False)
    assert error.value.param == "cuda_graphs"
    assert choose_recorder(None, CPU, streamed=False) is None
    assert choose_recorder(False, CPU, streamed=False) is None

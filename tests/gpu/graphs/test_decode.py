"""Decode steps that are replayed, with a recorder that needs no device: when that is done, that nobody can tell, and
what happens where it cannot be done.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.errors import FieldOutOfRange
from app.gpu.attention.base import Attention, AttentionSpec
from app.gpu.attention.batch import Batch, make_batch
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.graphs.decode import DecodeGraphs, DecodeLimits, batch_buckets
from app.gpu.graphs.recorder import choose_recorder
from app.gpu.graphs.recording import estimate_graph_bytes
from app.gpu.graphs.runs import KEPT_PASSES
from app.messages import Disarm
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt
from tests.gpu.graphs.graph_models import CPU, tiny, with_attention
from tests.gpu.graphs.recording import FakeMemory, FakeRecorder, PaddedAttention
from tests.gpu.oracle import greedy_tokens

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [3, 30, 9, 17, 5, 12, 40]


class Replays:
    """An engine that records, and how many of its steps were replayed."""

    def __init__(self, tiny: TinyModel) -> None:
        self.driver = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0))

    @property
    def count(self) -> int:
        return self.driver.memory().steps.replayed

    def in_next_step(self) -> int:
        before = self.count
        self.driver.advance()
        return self.count - before


@given(st.integers(1, 3000))
def test_the_bucket_of_any_batch_is_hardly_larger_than_the_batch(largest: int) -> None:
    buckets = batch_buckets(largest)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest
    for rows in range(1, largest + 1):
        bucket = min(bucket for bucket in buckets if bucket >= rows)
        assert bucket - rows < max(8, rows / 8)
        assert bucket - rows < rows


def describe(token_ids: Tensor, batch: Batch) -> Tensor:
    """A number for each row that depends on everything that a layer may read of it, and on nothing else."""
    columns = torch.stack((token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.contexts), dim=1)
    place = torch.arange(batch.block_tables.shape[1])
    visible = place < (batch.contexts[:, None] + BLOCK - 1) // BLOCK
    seen = (batch.block_tables * visible * (place + 7)).sum(dim=1)
    return torch.cat((columns, seen[:, None]), dim=1).float()


batches = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 99)), min_size=1, max_size=11)
"""Rows of one token: its position, and a token id that also decides which blocks the row has."""


@given(st.lists(batches, min_size=1, max_size=5))
def test_any_steps_one_after_the_other_find_their_own_inputs(steps: list[list[tuple[int, int]]]) -> None:
    graphs, recorder, sizes = DecodeGraphs(DecodeLimits(11, 16, 6), CPU), FakeRecorder(), []

    def decode(token_ids: Tensor, batch: Batch) -> Tensor:
        sizes.append(len(token_ids))
        padding = batch.contexts == 0
        assert torch.where(padding, batch.slot_blocks == -1, batch.slot_blocks >= 0).logical_and_(
            torch.where(padding, batch.positions == 0, True)
        ).numpy().all()  # fmt: skip
        return describe(token_ids, batch)

    for bucket in reversed(graphs.buckets):
        graphs.record(bucket, decode, recorder)
    for rows in steps:
        tables = [[(seed * 31 + place) % 500 for place in range(position // BLOCK + 1)] for position, seed in rows]
        batch = make_batch([(position, 1) for position, _ in rows], tables, BLOCK, CPU)
        token_ids = torch.tensor([seed for _, seed in rows])
        assert torch.equal(graphs(token_ids, batch), describe(token_ids, batch))
        assert sizes[-1] == next(bucket for bucket in [1, 2, 4, 8, 11] if bucket >= len(rows))


def test_sessions_that_come_and_go_get_the_tokens_of_transformers(tiny: TinyModel) -> None:
    """Longer and shorter ones take each other's places, while prompts of others run."""
    replays = Replays(tiny)
    driver, turns = replays.driver, []
    for seed, length in enumerate(LENGTHS + LENGTHS[:4]):
        start = prompt(seed, length)
        turns.append((start, driver.begin(driver.open(), start, 5 + seed)))
        driver.advance()
        driver.advance()
    driver.settle(*(turn for _, turn in turns))
    for start, turn in turns:
        assert turn.tokens == greedy_tokens(tiny.oracle, start, len(turn.tokens))
    assert replays.count > 20


@pytest.mark.parametrize(
    ("action", "edits"), [(Action.CAPTURE, ()), (Action.EDIT, (Edit(EditOp.SCALE, factor=1.5),)), (Action.PAUSE, ())]
)
def test_a_step_with_an_armed_row_is_not_replayed(tiny: TinyModel, action: Action, edits: tuple[Edit, ...]) -> None:
    replays = Replays(tiny)
    driver, sessions = replays.driver, [replays.driver.open() for _ in range(2)]
    turns = [driver.begin(session, prompt(seed, 6), 30) for seed, session in enumerate(sessions)]
    driver.advance()
    assert [replays.in_next_step() for _ in range(3)] == [1, 1, 1]
    driver.arm(sessions[0], 2, action=action, when=When(Pass.DECODE), edits=edits)
    assert replays.in_next_step() == 0
    if turns[0].paused:
        assert replays.in_next_step() == 1, "only the other session runs"
        driver.resume(turns[0])
        assert replays.in_next_step() == 0
    driver.do(Disarm(driver.ticket(), sessions[0]))
    if turns[0].paused:
        driver.resume(turns[0])
        assert replays.in_next_step() == 0, "the rest of a pass"
    assert [replays.in_next_step() for _ in range(3)] == [1, 1, 1]
    driver.settle(*turns)
    assert turns[1].tokens == greedy_tokens(tiny.oracle, prompt(1, 6), 30)


def test_a_breakpoint_that_no_position_meets_costs_no_graph(tiny: TinyModel) -> None:
    replays = Replays(tiny)
    session = replays.driver.open()
    turn = replays.driver.begin(session, prompt(1, 6), 12)
    replays.driver.arm(session, 2, action=Action.CAPTURE, when=When(position=13))
    replays.driver.advance()
    assert [replays.in_next_step() for _ in range(10)] == [1] * 7 + [0] + [1] * 2
    counts = replays.driver.memory().steps
    assert (counts.replayed, counts.eager) == (9, 2)
    replays.driver.settle(turn)


def test_a_step_with_a_row_that_samples_nothing_is_not_replayed(tiny: TinyModel) -> None:
    replays = Replays(tiny)
    driver = replays.driver
    turn = driver.begin(driver.open(), prompt(1, 6), 12)
    driver.advance()
    driver.begin(driver.open(), [9], 0)
    assert [replays.in_next_step() for _ in range(3)] == [0, 1, 1]
    driver.settle(turn)
    assert turn.tokens == greedy_tokens(tiny.oracle, prompt(1, 6), 12)


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
    turn = driver.begin(driver.open(), prompt(4, 9), 8)
    driver.settle(turn)
    assert turn.tokens == greedy_tokens(tiny.oracle, prompt(4, 9), 8)


def test_the_estimate_is_the_largest_graph_and_a_small_one_for_each_of_the_others_and_for_parts(
    tiny: TinyModel,
) -> None:
    recorder = FakeRecorder()
    memory = FakeMemory(recorder, [7000, 300])
    limits = DecodeLimits(rows=20, blocks=32, vocab_size=tiny.stack.vocab_size)
    assert batch_buckets(20) == [1, 2, 4, 8, 16, 20]
    found = estimate_graph_bytes(tiny.stack, BLOCK, limits, recorder, memory, tiny.stack.dtype)
    assert found == 7000 + (5 + KEPT_PASSES) * 300
    assert recorder.recorded == 0
    stack = with_attention(tiny, Waits()).stack
    assert estimate_graph_bytes(stack, BLOCK, limits, recorder, FakeMemory(recorder, []), stack.dtype) == 0


def test_graphs_that_are_asked_for_need_a_gpu() -> None:
    with pytest.raises(FieldOutOfRange, match="cuda_graphs: the device is cpu") as error:
        choose_recorder(True, CPU, streamed=False)
    assert error.value.param == "cuda_graphs"
    assert choose_recorder(None, CPU, streamed=False) is None
    assert choose_recorder(False, CPU, streamed=False) is None

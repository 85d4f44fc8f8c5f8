"""Decode steps that are replayed, with a recorder that needs no device: when that is done, and that nobody can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.values import SamplingParams
from app.gpu.attention.batch import Batch, make_batch
from app.gpu.graphs.decode import DecodeGraphs, DecodeLimits, batch_buckets
from app.gpu.graphs.recording import record_graphs
from app.gpu.kv_pools.device import KVPool
from app.gpu.models import load_stack
from app.messages import Disarm, Token
from app.model_store.resolve import resolve
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt
from tests.gpu.graphs.graph_models import CPU, tiny
from tests.gpu.graphs.recording import FakeRecorder, PaddedAttention
from tests.gpu.models.driving import Drive
from tests.gpu.models.oracle import build_model, expect, save_model, tiny_config
from tests.gpu.oracle import greedy_tokens

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [3, 30, 9, 17, 5, 12, 40]


class Replays:
    """An engine that records, and how many of its steps were replayed."""

    def __init__(self, tiny: TinyModel) -> None:
        self.driver = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0))
        self.count = 0
        runner = self.driver.engine._runner
        assert isinstance(runner._decode, DecodeGraphs)
        self._graphs = runner._decode
        runner._decode = self._replay

    def in_next_step(self) -> int:
        before = self.count
        self.driver.advance()
        return self.count - before

    def _replay(self, token_ids: Tensor, batch: Batch) -> Tensor:
        self.count += 1
        return self._graphs(token_ids, batch)


@given(st.integers(1, 3000))
def test_the_bucket_of_any_batch_is_hardly_larger_than_the_batch(largest: int) -> None:
    buckets = batch_buckets(largest)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest
    for rows in range(1, largest + 1):
        bucket = min(bucket for bucket in buckets if bucket >= rows)
        assert bucket - rows < max(8, rows / 8)
        assert bucket - rows < rows


def test_the_buckets_of_a_small_server() -> None:
    assert batch_buckets(1) == [1]
    assert batch_buckets(36) == [1, 2, 4, 8, 16, 24, 32, 36]


def describe(token_ids: Tensor, batch: Batch) -> Tensor:
    """A number for each row that depends on everything that a layer may read of it, and on nothing else."""
    columns = torch.stack((token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.contexts), dim=1)
    place = torch.arange(batch.block_tables.shape[1])
    visible = place < (batch.contexts[:, None] + BLOCK - 1) // BLOCK
    seen = (batch.block_tables * visible * (place + 7)).sum(dim=1)
    return torch.cat((columns, seen[:, None]), dim=1).float()


batches = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 99)), min_size=1, max_size=11)
"""Rows of one token: its position, and a token id that also decides which blocks the row has."""


@settings(max_examples=60)
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


def test_log_probabilities_are_those_of_transformers(tiny: TinyModel) -> None:
    replays = Replays(tiny)
    driver, sampling = replays.driver, SamplingParams(seed=3, temperature=0.8, logprobs=5)
    starts = [prompt(seed, length) for seed, length in enumerate([20, 3, 7])]
    turns = [driver.begin(driver.open(), start, 9, sampling) for start in starts]
    driver.settle(*turns)
    assert replays.count >= 8
    for start, turn in zip(starts, turns, strict=True):
        with torch.no_grad():
            wanted = tiny.oracle(torch.tensor([start + turn.tokens])).logits[0].log_softmax(-1)
        said = [event for event in turn.events[turn.tickets[0]] if isinstance(event, Token)]
        for position, event in enumerate(said, len(start) - 1):
            assert event.logprobs is not None
            for token, logprob in [(event.logprobs.token_id, event.logprobs.logprob), *event.logprobs.top]:
                assert logprob == pytest.approx(float(wanted[position, token]), abs=1e-4)


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
    counts = replays.driver.engine._runner.counts()
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


def test_padding_rows_write_to_nobodys_kv(tiny: TinyModel) -> None:
    replays = Replays(tiny)
    driver, data = replays.driver, replays.driver.engine._runner.pool.data
    sessions = [driver.open() for _ in range(3)]
    for seed, session in enumerate(sessions):
        driver.begin(session, prompt(seed, 5 + seed), 30)
    driver.advance()
    for _ in range(6):
        before = data.clone()
        assert replays.in_next_step() == 1
        changed = (data != before).any(dim=3).flatten(1, 2).any(dim=1).any(dim=-1)
        rows = [driver.engine._handler._sessions.find(session) for session in sessions]
        last = [row.computed - 1 for row in rows]
        own = {(row.blocks[at // BLOCK], at % BLOCK) for row, at in zip(rows, last, strict=True)}
        assert {(block, offset) for block, offset in changed.nonzero().tolist()} == own


@pytest.mark.parametrize("case", ["qwen2-window", "smollm3", "gpt2", "gpt_neox", "gemma2", "phi3", "mixtral"])
@torch.inference_mode()
def test_every_kind_of_model_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    oracle = build_model(tiny_config(case))
    resolved = resolve(str(save_model(oracle, tmp_path)), cache_dir=tmp_path)
    stack = load_stack(resolved, device=CPU, dtype=torch.float32, attention=PaddedAttention())
    sequences = [torch.arange(5, 21), torch.arange(30, 39), torch.arange(50, 62)]
    drive = Drive(stack, sequences)
    pool = KVPool(stack, len(drive.pool), BLOCK)
    graphs = record_graphs(stack, pool, DecodeLimits(3, 8, stack.vocab_size), FakeRecorder())
    assert graphs is not None
    drive.pool = pool.data.copy_(drive.pool)
    drive.run([{0: 9, 1: 1, 2: 7}])
    wanted = [expect(oracle, tokens).logits for tokens in sequences]
    for step in ({0: 1, 1: 1}, {0: 1, 1: 1, 2: 1}, {2: 1}, {0: 1, 2: 1}, {1: 1}):
        rows, batch, token_ids = drive.begin(step)
        found = graphs(token_ids, batch)
        for logits, row in zip(found, rows, strict=True):
            assert torch.allclose(logits, wanted[row][drive.done[row] - 1], atol=1e-3, rtol=1e-4)

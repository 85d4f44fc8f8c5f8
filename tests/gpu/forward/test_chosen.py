"""What a step does to many rows or positions at once: to each what it does to one."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import Edit, EditOp, Intervention
from app.domain.positions import positions_of, runs_of
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.device.streams import CpuStreams, put_each
from app.gpu.forward.boundary import BoundaryActions, HostTensor, apply_edit, as_tensor
from app.gpu.forward.inputs import LEAST_ROWS, Batches
from app.gpu.state.paths import PassPlan, Record
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState
from tests.gpu.breakpoints.breaking_models import vector
from tests.gpu.breakpoints.breaking_oracle import data_of

FIRST, LENGTH = 7, 40
CPU = torch.device("cpu")
EVERY = st.integers(1, LENGTH).map(lambda step: {each for each in range(FIRST, FIRST + LENGTH) if each % step == 0})
ANY = st.sets(st.integers(FIRST, FIRST + LENGTH - 1))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def row_with(step: Intervention | Record) -> Row:
    tokens = list(range(100, 100 + FIRST + LENGTH))
    sequence = TokenSequence(SessionId("ses"), b"", tokens=tokens)
    turn = TurnState(Ticket(1), SamplingParams(seed=0), StopRule(1), len(tokens), 0)
    path = PassPlan(0, 4, (step,))
    return Row(sequence, turn, FIRST, LENGTH, path, samples=False, scores_prompt=False)


@given(
    op=st.sampled_from(EditOp),
    factor=st.sampled_from([-2.0, 0.3, 1.0]),
    max_norm=st.sampled_from([None, 0.5]),
    chosen=(EVERY | ANY).filter(bool),
    hidden_size=st.sampled_from([3, 48, 960]),
    dtype=DTYPES,
)
def test_an_indexed_edit_has_the_bits_of_one_position_after_the_other(
    op: EditOp, factor: float, max_norm: float | None, chosen: set[int], hidden_size: int, dtype: torch.dtype
) -> None:
    needs = op not in (EditOp.SCALE, EditOp.ABLATE)
    edit = Edit(op, factor, data_of(vector(1, hidden_size)) if needs else None, max_norm=max_norm)
    made = Intervention.at(runs_of(sorted(chosen)), 1, edit)
    before = torch.randn(LENGTH, hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, wanted, row = before.clone(), before.clone(), row_with(made)
    BoundaryActions([row], put_each(CPU), CpuStreams(), as_tensor).act(row, 1, found)
    for position in chosen:
        apply_edit(wanted[position - FIRST : position - FIRST + 1], edit)
    assert torch.equal(found, wanted)


@given(chosen=(EVERY | ANY).filter(bool))
def test_a_capture_has_the_chosen_positions_and_keeps_them(chosen: set[int]) -> None:
    record = Record(1, "bp", runs_of(sorted(chosen)))
    row = row_with(record)
    hidden = torch.arange(LENGTH * 2.0).view(LENGTH, 2)
    actions = BoundaryActions([row], put_each(CPU), CpuStreams(), as_tensor)
    actions.act(row, 1, hidden)
    hidden.zero_()
    [captured] = actions.captured[row]
    assert isinstance(captured.hidden, HostTensor)
    positions, token_ids, seen = captured.positions, captured.token_ids, captured.hidden.tensor
    assert positions == tuple(sorted(chosen)) == tuple(positions_of(record.runs))
    assert token_ids == tuple(100 + position for position in positions)
    assert seen[:, 0].tolist() == [2.0 * (position - FIRST) for position in positions]


SESSIONS = 3 * LEAST_ROWS
blocks = st.lists(st.integers(0, 400), max_size=20)
changes = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 400)),
    st.tuples(st.just("drop"), st.integers(0, 20)),
    st.tuples(st.just("replace"), st.integers(0, 400)),
    st.tuples(st.just("move"), blocks),
)
steps = st.lists(
    st.tuples(st.lists(st.integers(0, SESSIONS - 1), min_size=1, unique=True), st.lists(changes, max_size=6)),
    min_size=1,
    max_size=8,
)


def change(sequence: TokenSequence, what: str, value: Any) -> None:
    """As blocks are reserved, given up, written to by one of two that share them, and brought back."""
    if what == "append":
        sequence.blocks += [value]
    elif what == "drop":
        del sequence.blocks[value:]
    elif what == "replace":
        sequence.blocks[-1:] = [value]
    else:
        sequence.blocks = list(value)


@given(st.lists(blocks, min_size=SESSIONS, max_size=SESSIONS), steps)
def test_any_steps_find_the_blocks_of_their_sequences(
    held: list[list[int]], taken: list[tuple[list[int], list[tuple[str, Any]]]]
) -> None:
    sequences = [TokenSequence(SessionId(str(n)), b"", blocks=list(each)) for n, each in enumerate(held)]
    tables = Batches(4)
    for numbers, changed in taken:
        for place, (what, value) in enumerate(changed):
            change(sequences[numbers[place % len(numbers)]], what, value)
        members = [sequences[number] for number in numbers]
        found = tables.tables_of(members)
        assert found.shape == (len(members), max(len(each.blocks) for each in members))
        for row, member in zip(found.tolist(), members, strict=True):
            assert row == member.blocks + [0] * (len(row) - len(member.blocks))

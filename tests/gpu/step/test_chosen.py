"""An edit of many positions does to each what it does to one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import Edit, EditOp, Intervention
from app.domain.positions import positions_of, runs_of
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.device.staging import put_each
from app.gpu.passes.pass_plan import PassPlan, Record, marks_of
from app.gpu.passes.segments import Row
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState
from app.gpu.step.chosen import Chosen
from app.gpu.step.edits import apply_edit
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
    way = PassPlan(0, 4, marks_of([step]))
    return Row(sequence, turn, FIRST, LENGTH, way, samples=False, scores_prompt=False)


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
    with Chosen([row], put_each(CPU)).changing(row, made.runs, found) as there:
        apply_edit(there, edit)
    for position in chosen:
        apply_edit(wanted[position - FIRST : position - FIRST + 1], edit)
    assert torch.equal(found, wanted)


@given(chosen=(EVERY | ANY).filter(bool))
def test_a_capture_has_the_chosen_positions_and_keeps_them(chosen: set[int]) -> None:
    record = Record(1, "bp", runs_of(sorted(chosen)))
    row = row_with(record)
    hidden = torch.arange(LENGTH * 2.0).view(LENGTH, 2)
    places = Chosen([row], put_each(CPU))
    seen, (positions, token_ids) = places.copy(row, record.runs, hidden), places.tokens(row, record.runs)
    hidden.zero_()
    assert positions == tuple(sorted(chosen)) == tuple(positions_of(record.runs))
    assert token_ids == tuple(100 + position for position in positions)
    assert seen[:, 0].tolist() == [2.0 * (position - FIRST) for position in positions]

"""What an edit does to numbers: heads, neurons, lengths and conditions, against loops in plain torch."""

from itertools import product

import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import Edit, EditOp, Gate, Part, PartKind
from app.gpu.forward.boundary import apply_edit
from app.gpu.forward.uploads import LoadedUploads
from tests.gpu.breakpoints.breaking_oracle import data_of, edited

POSITIONS, HEADS, HEAD_DIM = 5, 4, 6
NO_UPLOADS = LoadedUploads(torch.device("cpu")).get
WIDTH = HEADS * HEAD_DIM
FACTORS = {EditOp.SCALE: 0.4, EditOp.ADD: 2.5, EditOp.CLAMP: -6.0}
CHOSEN = {PartKind.HEADS: (1, 3), PartKind.NEURONS: (0, 5, 17)}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN, ALONG = numbers(POSITIONS, WIDTH, seed=1), numbers(WIDTH, seed=2)
FIELDS: list[dict[str, object]] = [
    {},
    {"keep_norm": True},
    {"max_norm": 0.75},
    {"gate": Gate(data_of(ALONG), above=0.5)},
    {"gate": Gate(data_of(ALONG), above=-4.0, below=2.0), "keep_norm": True},
]


def by_hand(edit: Edit, vector: Tensor) -> Tensor:
    """The formulas of the documentation, one position and one `h` after the other."""
    places = [torch.arange(WIDTH)]
    if edit.part is not None and edit.part.kind is PartKind.HEADS:
        places = [torch.arange(head * HEAD_DIM, (head + 1) * HEAD_DIM) for head in edit.part.chosen]
    elif edit.part is not None:
        places = [torch.tensor(edit.part.chosen)]
    wanted = HIDDEN.clone()
    for position, place in product(range(POSITIONS), places):
        along = float(HIDDEN[position].double() @ ALONG.double())
        if edit.gate and (along <= (edit.gate.above or 0) or along >= (edit.gate.below or 1e9)):
            continue
        own = vector[place] if len(vector) == WIDTH else vector
        op = EditOp.REPLACE if edit.op is EditOp.ABLATE and edit.vector else edit.op
        before = HIDDEN[position, place]
        after = edited(op, before, edit.factor, own, edit.max_norm)
        wanted[position, place] = after * (before.norm() / after.norm() if edit.keep_norm and after.any() else 1)
    return wanted


@pytest.mark.parametrize("of", ["whole", "part"])
@pytest.mark.parametrize("kind", [None, *CHOSEN])
@pytest.mark.parametrize("op", EditOp)
@pytest.mark.parametrize("fields", FIELDS, ids=["plain", "keep_norm", "max_norm", "above", "between"])
def test_an_edit_is_its_formula(op: EditOp, kind: PartKind | None, fields: dict[str, object], of: str) -> None:
    part = kind and Part(kind, CHOSEN[kind], HEADS if kind is PartKind.HEADS else WIDTH)
    size = WIDTH if of == "whole" or kind is None else HEAD_DIM if kind is PartKind.HEADS else len(CHOSEN[kind])
    vector = 3 * numbers(size, seed=3)
    edit = Edit(op, FACTORS.get(op, 1.0), None if op is EditOp.SCALE else data_of(vector), part=part, **fields)  # type: ignore[arg-type]
    found = HIDDEN.clone()
    apply_edit(found, edit, NO_UPLOADS)
    torch.testing.assert_close(found, by_hand(edit, vector), rtol=1e-5, atol=1e-5)
    if fields.keys() == {"gate"}:
        assert 0 < int((found != HIDDEN).any(1).sum()) < POSITIONS


def test_what_is_not_chosen_keeps_its_bits_in_memory_of_others() -> None:
    """A row lies between others in one batch, and what is edited is a view of it."""
    batch = numbers(9, WIDTH, seed=5).bfloat16()
    wanted = batch.clone()
    wanted[[2, 5], 2 * HEAD_DIM : 3 * HEAD_DIM] = 0
    gate = Gate(data_of(torch.zeros(WIDTH)), below=1.0)
    apply_edit(batch[2:8:3], Edit(EditOp.ABLATE, part=Part(PartKind.HEADS, (2,), HEADS), gate=gate), NO_UPLOADS)
    assert torch.equal(batch, wanted)

"""What goes along with an exported session comes back whole, and nothing that a session cannot have comes in."""

import json
import math
import struct
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from app.domain.activations import CheckpointInfo, PausedTurn
from app.domain.breakpoints import (
    MAX_INTERVENTION_BYTES,
    MAX_INTERVENTIONS,
    MAX_PASS_EDITS,
    Action,
    Breakpoint,
    Edit,
    EditOp,
    Intervention,
    OnTimeout,
    Pass,
    Positions,
    TensorData,
    When,
)
from app.domain.errors import FieldOutOfRange
from app.domain.positions import Run
from app.domain.values import SamplingParams, SessionId, StopRule, TokenLogprobs
from app.exports.checks import SnapshotChecks
from app.exports.snapshot import MAX_NAMES, PausedTurnSnapshot, SessionSnapshot, check_text, most_values
from app.sessions.session import PausedPlace, PauseLimit, Session
from app.text.generation import TextRule
from tests.journal.building import model_info

MODEL = model_info()
HISTORY = array("I", [1, 2, 3, 7, 9])


def tensor(rows: int | None = None, value: float = 0.5, dtype: str = "float32") -> TensorData:
    """One vector of the model's width, or `rows` of them."""
    shape = (MODEL.hidden_size,) if rows is None else (rows, MODEL.hidden_size)
    count = math.prod(shape)
    return TensorData(dtype, shape, struct.pack(f"<{count}f", *[value] * count))


ADD = Edit(EditOp.ADD, -2.0, tensor(), Positions(1, 9), max_norm=3.0)
SCALE = Edit(EditOp.SCALE, 0.9)
WRITTEN = Edit(EditOp.REPLACE, vector=tensor(2))
STEER = Breakpoint("bp_0123456789abcdef", (0, 1), Action.EDIT, edits=(ADD, SCALE))
WAIT = Breakpoint("bp_00000000000000ff", (1,), Action.PAUSE, When(Pass.DECODE, 3, 7, 2), (), True, 2.5, OnTimeout.ABORT)
MADE = (Intervention(0, 2, 1, SCALE), Intervention(1, 3, 2, WRITTEN), Intervention.at((Run(0, 3, 2),), 2, SCALE))
PLACE = CheckpointInfo(1, 4, 5, MODEL.hidden_size, "float32", 256, Pass.DECODE, WAIT.id, 0.1, 1.0)
SAMPLING = SamplingParams(seed=7, temperature=0.5, top_k=3, logit_bias={5: -1.5}, logprobs=1)
STOP = StopRule(9, 2, frozenset({8, 257}))
TURN = PausedTurn(SAMPLING, STOP, 3, PLACE, tensor(1), (*MADE, Intervention(4, 5, 2, SCALE)))
LOGPROBS = (TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.5))), TokenLogprobs(9, -math.inf, ()))
RULE = TextRule(("stop", "€"), 2, logprobs=1)
PAUSED = PausedPlace(PLACE, PauseLimit(2.5, OnTimeout.ABORT), RULE, HISTORY[:3], 3, 9, LOGPROBS)


def snapshot(turn: PausedTurn | None = TURN, place: PausedPlace = PAUSED, **changed: Any) -> SessionSnapshot:
    """That of a session with everything, or with some things `changed`, as it is read from a file."""
    session = Session(SessionId("ses_1"), None, {"task": "é"}, 60, history=HISTORY)
    session.breakpoints = {each.id: each for each in (STEER, WAIT)}
    session.interventions = MADE
    whole = SessionSnapshot.of(session, None if turn is None else PausedTurnSnapshot.of(turn, place))
    return SessionSnapshot.from_json(whole.model_copy(update=changed).to_json())


def check(found: SessionSnapshot) -> None:
    SnapshotChecks(MODEL, HISTORY, part_tokens=2).check(found)


def test_everything_comes_back_as_it_was() -> None:
    found = snapshot()
    check(found)
    check(snapshot(interventions=(Intervention(0, 3, 1, SCALE, (Run(0, 1), Run(2, 3))),)))
    assert (found.metadata, found.ttl_s) == ({"task": "é"}, 60)
    assert (found.breakpoints, found.interventions) == ((STEER, WAIT), MADE)
    assert found.turn is not None
    assert found.turn.to_turn() == TURN
    assert found.turn.to_place(HISTORY) == PAUSED


def test_written_activations_count_each_although_they_are_one_in_the_file() -> None:
    """Each is cut and kept by itself when the KV is computed."""
    history = array("I", [1] * 4096)
    written = tensor(len(history))
    most = MAX_INTERVENTION_BYTES // len(written.data)
    made = Intervention(0, len(history), 2, Edit(EditOp.REPLACE, vector=written))
    checks = SnapshotChecks(MODEL, history, part_tokens=2)
    checks.check(snapshot(None, breakpoints=(), interventions=(made,) * most))
    with pytest.raises(ValueError, match="bytes"):
        checks.check(snapshot(None, breakpoints=(), interventions=(made,) * (most + 1)))


EDITS = {
    "an unfit vector": replace(ADD, vector=TensorData("float32", (2,), bytes(8))),
    "a vector without its data": replace(ADD, vector=replace(tensor(), data=b"")),
    "a vector that is not finite": replace(ADD, vector=tensor(value=math.nan)),
    "no vector": replace(ADD, vector=None),
    "a vector for nothing": replace(SCALE, vector=tensor()),
    "no direction": Edit(EditOp.PROJECT_OUT, vector=tensor(value=0.0)),
    "more than a direction": Edit(EditOp.CLAMP, vector=tensor(value=1e18)),
    "an infinite factor": replace(SCALE, factor=math.inf),
    "a norm of nothing": replace(SCALE, max_norm=0.0),
    "positions backwards": replace(SCALE, positions=Positions(3, 3)),
}
BREAKPOINTS = {
    "a layer too many": replace(WAIT, layers=(2,)),
    "a layer twice": replace(WAIT, layers=(1, 1)),
    "another id": replace(WAIT, id="bp_../../x"),
    "a position outside": replace(WAIT, when=When(position=1024)),
    "a token outside": replace(WAIT, when=When(token_id=512)),
    "every none": replace(WAIT, when=When(every=0)),
    "no time": replace(WAIT, timeout_s=0.0),
    "a pause that edits": replace(WAIT, edits=(SCALE,)),
    "an edit with too many": replace(STEER, edits=(SCALE,) * 17),
    **{name: replace(STEER, edits=(SCALE, edit)) for name, edit in EDITS.items()},
    "a row for each position": replace(STEER, edits=(WRITTEN,)),
}


INTERVENTIONS = {
    "past the history": Intervention(0, 6, 1, SCALE),
    "nowhere": Intervention(2, 2, 1, SCALE),
    "before the first layer": Intervention(0, 2, 0, SCALE),
    "too few rows": Intervention(0, 3, 1, WRITTEN),
    "a wrong row": Intervention(0, 1, 1, replace(WRITTEN, vector=tensor(1, math.inf))),
    "positions twice": Intervention(0, 3, 1, SCALE, (Run(0, 3),) * 2),
    "positions past its end": Intervention(0, 3, 1, SCALE, (Run(0, 1), Run(3, 4))),
    "positions without a step": Intervention(0, 3, 1, SCALE, (Run(0, 3, 0),)),
    "falling positions": Intervention(0, 3, 1, SCALE, (Run(2, 3), Run(0, 1))),
    "an end that is none": Intervention(0, 3, 1, SCALE, (Run(0, 2, 2), Run(2, 3))),
}


TURNS = {
    "another length": replace(TURN, prompt_tokens=4),
    "longer than it may be": replace(TURN, stop=replace(STOP, max_tokens=2)),
    "without its log-probabilities": replace(TURN, sampling=replace(SAMPLING, logprobs=None)),
    "a token outside": replace(TURN, sampling=replace(SAMPLING, logit_bias={512: 1.0})),
    "a layer outside": replace(TURN, checkpoint=replace(PLACE, layer=2)),
    "a position outside": replace(TURN, checkpoint=replace(PLACE, end=6)),
    "another model's width": replace(TURN, checkpoint=replace(PLACE, hidden_size=65)),
    "no pass": replace(TURN, checkpoint=replace(PLACE, in_pass=Pass.ANY)),
    "no time": replace(TURN, checkpoint=replace(PLACE, created_at=math.nan)),
    "more rows": replace(TURN, hidden=tensor(2)),
    "a row that is not finite": replace(TURN, hidden=tensor(1, math.nan)),
}


REFUSED: dict[str, Callable[[], SessionSnapshot]] = {
    **{f"breakpoint: {name}": partial(snapshot, breakpoints=(each,)) for name, each in BREAKPOINTS.items()},
    **{f"intervention: {name}": partial(snapshot, interventions=(each,)) for name, each in INTERVENTIONS.items()},
    "intervention of the turn": partial(snapshot, replace(TURN, interventions=(INTERVENTIONS["past the history"],))),
    **{f"turn: {name}": partial(snapshot, turn) for name, turn in TURNS.items()},
    **{f"pause: {s} s": partial(snapshot, place=replace(PAUSED, limit=PauseLimit(s))) for s in (1e9, 0.0, math.nan)},
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_no_session_can_have_does_not_come_in(make: Callable[[], SessionSnapshot]) -> None:
    with pytest.raises((ValueError, FieldOutOfRange)):
        check(make())


def in_pass(in_pass: Pass, first: int, end: int, prompt_tokens: int) -> SessionSnapshot:
    """That of a turn over the history that is paused in such a pass."""
    size = 4 * MODEL.hidden_size * (end - first)
    place = replace(PLACE, in_pass=in_pass, first=first, end=end, bytes=size)
    generated = len(HISTORY) - prompt_tokens
    turn = replace(TURN, checkpoint=place, hidden=tensor(end - first), prompt_tokens=prompt_tokens, interventions=())
    return snapshot(turn, replace(PAUSED, logprobs=LOGPROBS[:generated]))


@pytest.mark.parametrize(
    ("kind", "first", "end", "prompt_tokens"),
    [(Pass.PREFILL, 0, 2, 5), (Pass.PREFILL, 3, 5, 5), (Pass.DECODE, 4, 5, 4), (Pass.DECODE, 4, 5, 3)],
)
def test_a_turn_is_paused_in_a_part_of_its_context_or_at_its_newest_token(
    kind: Pass, first: int, end: int, prompt_tokens: int
) -> None:
    check(in_pass(kind, first, end, prompt_tokens))


@pytest.mark.parametrize(
    ("kind", "first", "end", "prompt_tokens"),
    [
        (Pass.PREFILL, 2, 5, 5),
        (Pass.PREFILL, 0, 2, 4),
        (Pass.PREFILL, 4, 6, 5),
        (Pass.DECODE, 3, 5, 3),
        (Pass.DECODE, 4, 5, 5),
        (Pass.DECODE, 5, 6, 4),
        (Pass.ANY, 4, 5, 4),
    ],
)
def test_a_turn_is_paused_in_no_other_pass(kind: Pass, first: int, end: int, prompt_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"a {kind} pass over {first}:{end}"):
        check(in_pass(kind, first, end, prompt_tokens))


def test_breakpoints_do_not_have_more_to_do_than_can_be_armed() -> None:
    busy = [replace(STEER, id=f"bp_{index:016x}", edits=(SCALE,) * 16) for index in range(9)]
    check(snapshot(breakpoints=(*busy[:8], WAIT)))
    with pytest.raises(ValueError, match="more than 256 edits"):
        check(snapshot(breakpoints=tuple(busy)))
    with pytest.raises(ValueError, match="breakpoints"):
        check(snapshot(breakpoints=(WAIT, WAIT)))
    often = replace(STEER, when=When(every=2), layers=(0, 1), edits=(SCALE,) * 16)
    check(snapshot(breakpoints=tuple(replace(often, id=f"bp_{index:016x}") for index in range(8))))


def test_there_are_not_more_interventions_than_are_kept() -> None:
    every_other = tuple(Run(first, first + 1) for first in (0, 3))
    made = (Intervention.at(every_other, 1, SCALE),) * 3
    history = array("I", [1] * MAX_INTERVENTIONS)
    one_each = [Intervention(first, first + 1, 1, SCALE) for first in range(MAX_INTERVENTIONS - 6)]
    checks = SnapshotChecks(MODEL, history, part_tokens=2)
    checks.check(snapshot(None, interventions=(*made, *one_each)))
    with pytest.raises(ValueError, match=f"more than {MAX_INTERVENTIONS}"):
        checks.check(snapshot(None, interventions=(*made, *one_each, one_each[0])))


def test_no_position_has_more_interventions_than_a_pass_can_have() -> None:
    made = tuple(Intervention.at((Run(0, 3, 2),), 1, SCALE) for _ in range(MAX_PASS_EDITS))
    beside = Intervention(1, 2, 1, SCALE)
    check(snapshot(None, interventions=(*made, beside)))
    for forged in (Intervention(2, 3, 2, SCALE), Intervention(0, 2, 1, SCALE)):
        with pytest.raises(ValueError, match=f"more than {MAX_PASS_EDITS} at one position"):
            check(snapshot(None, interventions=(*made, forged)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" + b"1," * most_values(1) + b"1]", f"{most_values(1)} values"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_NAMES + 1)))).encode(), f"from 0 to {MAX_NAMES}"),
    ],
    ids=["values", "names"],
)
def test_a_text_that_is_no_snapshot_is_refused_before_its_fields_are_looked_at(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_text(text, tokens=1)

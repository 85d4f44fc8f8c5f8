"""Labels that a client has made up hold up no others, and the largest that a session can have is read."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from app.domain.breakpoints import MAX_INTERVENTIONS, Edit, EditOp, Intervention, TensorData
from app.domain.nesting import has_more_values
from app.exports.label import ExportLabel, ScoredToken
from app.exports.label_text import MAX_NAMES, MAX_VALUES, TOKEN_VALUES, check_text, most_values

VECTOR = TensorData("float32", (1,), bytes(4))
EDIT = Edit(EditOp.ADD, -0.5, VECTOR, max_norm=2.0)


def test_a_session_with_as_many_edits_as_it_may_have_comes_in() -> None:
    made = tuple(Intervention(first, first + 1, 1, EDIT) for first in range(MAX_INTERVENTIONS))
    text = ExportLabel(interventions=made).model_dump_json().encode()
    assert not has_more_values(text, MAX_VALUES // 2)  # its paused turn may have as many
    check_text(text, tokens=0)
    assert ExportLabel.model_validate_json(text).interventions == made


def test_all_log_probabilities_of_a_token_come_in() -> None:
    scored = ScoredToken(token_id=1, logprob=-0.5, top=tuple((number, -0.5) for number in range(20)))
    assert not has_more_values(scored.model_dump_json(), TOKEN_VALUES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" + b"1," * most_values(1) + b"1]", f"{most_values(1)} values"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_NAMES + 1)))).encode(), f"from 0 to {MAX_NAMES}"),
    ],
    ids=["values", "names"],
)
def test_a_text_that_is_no_label_is_refused_before_its_fields_are_looked_at(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_text(text, tokens=1)


@pytest.mark.parametrize("name", ["breakpoints", "interventions", "edits", "only", "logprobs"])
def test_only_the_first_wrong_value_of_a_list_is_told(name: str) -> None:
    wrong: list[object] = [{}] * 1000
    edit = {"op": "scale"}
    labels: dict[str, object] = {
        "breakpoints": {"breakpoints": wrong},
        "interventions": {"interventions": wrong},
        "edits": {"breakpoints": [{"id": "bp", "layers": [1], "action": "edit", "edits": wrong}]},
        "only": {"interventions": [{"first": 0, "end": 1, "boundary": 1, "edit": edit, "only": wrong}]},
        "logprobs": {"turn": {"logprobs": wrong}},
    }
    with pytest.raises(ValidationError) as refused:
        ExportLabel.model_validate_json(json.dumps(labels[name]))
    assert refused.value.error_count() < 20

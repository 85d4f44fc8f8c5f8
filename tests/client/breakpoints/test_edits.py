"""What is sent for an edit and a breakpoint, held against what the server reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

import client
from app.wire.breakpoints import BreakpointBody
from app.wire.checkpoint import ResumeBody
from app.wire.edits import EditBody
from client import breakpoint_calls as calls
from client import edits
from client.edge import to_request
from client.edits import EditOptions

HTTP = httpx.Client(base_url="http://host")
VECTOR = np.array([1.5, -2.0], dtype=np.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": 0.9}, {"op": "scale", "factor": 0.9}),
        ({"add": "kind", "factor": 2.0}, {"op": "add", "vector": "kind", "factor": 2.0}),
        ({"add": VECTOR}, {"op": "add", "vector": [1.5, -2.0]}),
        ({"replace": (1, 2)}, {"op": "replace", "vector": [1.0, 2.0]}),
        ({"project_out": [1.0], "max_norm": 3.0}, {"op": "project_out", "vector": [1.0], "max_norm": 3.0}),
        ({"clamp": "kind", "factor": 0.0}, {"op": "clamp", "vector": "kind", "factor": 0.0}),
        ({"ablate": True, "positions": (2, 5)}, {"op": "ablate", "positions": [2, 5]}),
        ({"scale": 2, "positions": "last"}, {"op": "scale", "factor": 2, "positions": "last"}),
    ],
)
def test_every_operation_has_its_form(options: EditOptions, expected: dict[str, Any]) -> None:
    sent = json.loads(to_request(HTTP, calls.edit_checkpoint("ses_1", [options])).read())
    assert sent == {"edits": [expected]}
    EditBody.model_validate_json(json.dumps(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "not none"),
        ({"factor": 2.0}, "not none"),
        ({"scale": 0.9, "ablate": True}, "not scale and ablate"),
        ({"scale": 0.9, "factor": 2.0}, "factor"),
        ({"ablate": False}, "ablate must be True"),
        ({"add": [[1.0], [1.0, 2.0]]}, "vector"),
        ({"add": object()}, "vector"),
    ],
)
def test_what_is_no_edit_is_not_sent(options: Any, message: str) -> None:
    with pytest.raises(client.InvalidRequest, match=message):
        edits.edit_body(options)
    with pytest.raises(client.InvalidRequest, match=message):
        calls.resume("ses_1", None, [options], stream=False)


def test_numbers_without_a_form_in_json_are_not_sent() -> None:
    with pytest.raises(client.InvalidRequest, match="float"):
        to_request(HTTP, calls.edit_checkpoint("ses_1", [{"add": [1.0, float("nan")]}]))


def test_a_breakpoint_sends_only_what_is_given() -> None:
    assert edits.pause_body({"layer": 6}) == {"action": "pause", "when": {}, "layer": 6}
    assert edits.capture_body({"layers": [1, 2], "once": True}) == {
        "action": "capture",
        "when": {},
        "layers": [1, 2],
        "once": True,
    }


def test_layers_are_any_sequence() -> None:
    sent = to_request(HTTP, calls.arm("ses_1", edits.capture_body({"layers": range(2, 4)}))).read()
    assert BreakpointBody.model_validate_json(sent).layers == [2, 3]


def test_every_field_of_a_breakpoint_can_be_given() -> None:
    """And the server knows every one of them."""
    every: edits.PauseOptions = {
        "layer": 6,
        "when_pass": "decode",
        "position": 70,
        "token_id": 5,
        "every": 10,
        "once": True,
        "timeout_s": 5.0,
        "on_timeout": "abort",
    }
    steer: edits.SteerOptions = {"layers": [3], "position": 1, "add": "kind", "factor": 2.0, "positions": "all"}
    paused = BreakpointBody.model_validate_json(json.dumps(edits.pause_body(every)))
    steered = BreakpointBody.model_validate_json(json.dumps(edits.steer_body(steer)))
    assert paused.model_fields_set | steered.model_fields_set == set(BreakpointBody.model_fields)
    assert paused.when.model_fields_set == {"in_pass", "position", "token_id", "every"}
    assert steered.edits is not None
    assert steered.edits[0].model_fields_set == {"op", "vector", "factor", "positions"}
    assert steered.when.position == 1


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (None, {"stream": False}),
        ("end", {"until": "end", "stream": False}),
        ("next_token", {"until": "next_token", "stream": False}),
        (0, {"until": {"layer": 0}, "stream": False}),
    ],
)
def test_how_far_to_resume(until: edits.Until | None, expected: dict[str, Any]) -> None:
    sent = to_request(HTTP, calls.resume("ses_1", until, (), stream=False)).read()
    assert json.loads(sent) == expected
    ResumeBody.model_validate_json(sent)


def test_tensors_travel_as_safetensors() -> None:
    request = to_request(HTTP, calls.put_vector("a.b", VECTOR))
    assert request.headers["content-type"] == "application/octet-stream"
    assert request.url.params["name"] == "a.b"
    assert request.read()

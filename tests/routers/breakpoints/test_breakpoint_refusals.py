"""What breakpoints cannot be: every refusal names the field, says what is allowed, and arms nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import HIDDEN, arm

EDIT: dict[str, Any] = {"layer": 1, "action": "edit"}
SCALE: dict[str, Any] = {"op": "scale", "factor": 2}
ONES = [1] * HIDDEN


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"layer": 4}, "layer", "0 to 3"),
        ({"layer": -1}, "layer", "an integer from 0 to 2147483647; got -1"),
        ({"layer": 1.0}, "layer", "integer"),
        ({"layer": None}, "layer", "exactly one of layer and layers, not none"),
        ({"layer": 1, "layers": [2]}, "layer", "exactly one of layer and layers, not both"),
        ({"layer": None, "layers": []}, "layers", "a list of at least 1 integer"),
        ({"layer": None, "layers": [0, 4]}, "layers.1", "0 to 3"),
        ({"layer": None, "layers": [0, 2, 0]}, "layers.2", "twice"),
        ({"action": None}, "action", "'pause', 'capture' or 'edit'"),
        ({"when": {"pass": "both"}}, "when.pass", "'prefill', 'decode' or 'any'"),
        ({"when": {"in_pass": "any"}}, "when.in_pass", "unknown field"),
        ({"when": {"position": -1}}, "when.position", "an integer from 0 to 2147483647"),
        ({"when": {"position": 1024}}, "when.position", "0 to 1023"),
        ({"when": {"token_id": 512}}, "when.token_id", "at most 511"),
        ({"when": {"every": 0}}, "when.every", "an integer from 1 to 2147483647"),
        ({"when": "prefill"}, "when", "an object"),
        ({"once": 1}, "once", "true or false; got"),
        ({"timeout_s": 0}, "timeout_s", "a number from 0.1 to 86400"),
        ({"on_timeout": "retry"}, "on_timeout", "'resume' or 'abort'"),
        ({"action": "capture", "timeout_s": 5}, "timeout_s", "goes with action pause, not with capture"),
        ({**EDIT, "edits": [SCALE], "on_timeout": "abort"}, "on_timeout", "goes with action pause, not with edit"),
        ({"edits": [SCALE]}, "edits", "goes with action edit, not with pause"),
        ({"action": "capture", "edits": [SCALE]}, "edits", "goes with action edit, not with capture"),
        ({"action": "edit"}, "edits", "needs 1 to 16"),
        ({"action": "edit", "edits": [SCALE] * 17}, "edits", "a list of 1 to 16 items; got a list of 17"),
        ({"name": "mine"}, "name", "unknown field"),
    ],
)
def test_a_bad_field_is_named_with_what_is_allowed(
    http: httpx.Client, session: str, body: dict[str, Any], param: str, says: str
) -> None:
    answer = http.post(f"{session}/breakpoints", json={"layer": 1, "action": "pause", **body})
    message = assert_error(answer, 422, "field_out_of_range", param=param)
    assert param in message
    assert says in message
    assert http.get(f"{session}/breakpoints").json() == {"data": []}


@pytest.mark.parametrize(
    ("edit", "field", "says"),
    [
        ({}, "op", "required"),
        ({"op": "explode"}, "op", "'scale', 'add', 'replace', 'project_out', 'clamp' or 'ablate'"),
        ({"op": "scale"}, "factor", "scale needs it"),
        ({"op": "clamp", "vector": ONES}, "factor", "clamp needs it"),
        ({"op": "ablate", "factor": 1}, "factor", "goes with scale, add, clamp, not with ablate"),
        ({"op": "project_out", "vector": ONES, "factor": 1}, "factor", "not with project_out"),
        ({"op": "scale", "factor": 1e30}, "factor", "a number from -1000000 to 1000000; got 1e+30"),
        ({"op": "scale", "factor": "2"}, "factor", "number"),
        *(({"op": op}, "vector", f"{op} needs it") for op in ("add", "replace", "project_out")),
        ({**SCALE, "vector": ONES}, "vector", "goes with add, replace, project_out, clamp, not with scale"),
        ({"op": "ablate", "vector": "v"}, "vector", "not with ablate"),
        ({"op": "add", "vector": ONES[1:]}, "vector", f"must have {HIDDEN} numbers, not {HIDDEN - 1}"),
        ({"op": "add", "vector": [*ONES[1:], None]}, "vector.63", "number"),
        ({"op": "add", "vector": [*ONES[1:], -1e39]}, "vector.63", "from -3.4028234663852886e+38"),
        ({"op": "add", "vector": "v" * 65}, "vector", "a string that matches ^[A-Za-z0-9_-]"),
        ({"op": "add", "vector": 1}, "vector", "string"),
        ({"op": "project_out", "vector": [0] * HIDDEN}, "vector", "from 1e-18 to 1e+18, not 0.0"),
        ({"op": "project_out", "vector": [1e20] * HIDDEN}, "vector", "from 1e-18 to 1e+18"),
        ({"op": "clamp", "vector": [1e-60] * HIDDEN, "factor": 1}, "vector", "from 1e-18 to 1e+18, not 0.0"),
        ({**SCALE, "positions": "first"}, "positions", "'last' or 'all'"),
        ({**SCALE, "positions": [1, 2, 3]}, "positions", "a list of 2 integers; got a list of 3"),
        ({**SCALE, "positions": [3, 3]}, "positions", "lower than the end"),
        ({**SCALE, "positions": [-1, 3]}, "positions.0", "an integer from 0 to 2147483647; got -1"),
        ({**SCALE, "positions": None}, "positions", "'last' or 'all'"),
        ({**SCALE, "max_norm": 0}, "max_norm", "a number above 0; got 0"),
        ({**SCALE, "layer": 1}, "layer", "unknown field"),
    ],
)
def test_a_bad_edit_is_named_with_its_place(
    http: httpx.Client, session: str, edit: dict[str, Any], field: str, says: str
) -> None:
    answer = http.post(f"{session}/breakpoints", json={**EDIT, "edits": [SCALE, edit]})
    message = assert_error(answer, 422, "field_out_of_range", param=f"edits.1.{field}")
    assert f"edits.1.{field}" in message
    assert says in message
    assert http.get(f"{session}/breakpoints").json() == {"data": []}


def test_a_vector_that_nobody_uploaded_is_not_found(http: httpx.Client, session: str) -> None:
    body = {**EDIT, "edits": [{"op": "add", "vector": "nobody.uploaded-this"}]}
    message = assert_error(http.post(f"{session}/breakpoints", json=body), 404, "not_found", param="vector")
    assert "nobody.uploaded-this" in message


def test_a_session_has_room_for_64(http: httpx.Client, session: str) -> None:
    for _ in range(64):
        arm(http, session, action="capture")
    answer = http.post(f"{session}/breakpoints", json={"layer": 1, "action": "pause"})
    assert "64" in assert_error(answer, 422, "field_out_of_range", param="breakpoints")
    assert len(http.get(f"{session}/breakpoints").json()["data"]) == 64


def test_a_session_has_room_for_256_edits_and_captures_in_a_pass(http: httpx.Client, session: str) -> None:
    """Each counts at each of its layers."""
    for _ in range(3):
        arm(http, session, layers=[0, 1, 2, 3], action="edit", edits=[SCALE] * 16)
    arm(http, session, layers=[0, 1, 2], action="edit", edits=[SCALE] * 16)
    for _ in range(7):
        arm(http, session, layers=[0, 3], action="capture")
    arm(http, session, layer=0, action="capture")
    for body in ({"layers": [0, 1], "action": "capture"}, {"layer": 0, **EDIT, "edits": [SCALE] * 2}):
        answer = http.post(f"{session}/breakpoints", json=body)
        assert "257" in assert_error(answer, 422, "field_out_of_range", param="breakpoints")
    often = {"layer": 0, **EDIT, "edits": [SCALE] * 2, "when": {"every": 2}}
    answer = http.post(f"{session}/breakpoints", json=often)
    assert "257" in assert_error(answer, 422, "field_out_of_range", param="breakpoints"), "as much as after each"
    arm(http, session, layers=[0, 1, 2, 3])
    arm(http, session, action="capture")
    answer = http.post(f"{session}/breakpoints", json={"layer": 0, "action": "capture"})
    assert "at most 256" in assert_error(answer, 422, "field_out_of_range", param="breakpoints")
    assert len(http.get(f"{session}/breakpoints").json()["data"]) == 14

"""Breakpoints: armed, listed, removed, refused, and what they do to turns."""

from typing import Any

import httpx
import pytest

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import HIDDEN, TURN, arm
from tests.routers.generating import streaming

SCALE: dict[str, Any] = {"op": "scale", "factor": 2}
ONES = [1] * HIDDEN


def test_a_breakpoint_is_as_it_was_asked_for(http: httpx.Client, session: str) -> None:
    when = {"pass": "decode", "position": 9, "token_id": 511, "every": 3}
    asked = {"layers": [3, 0], "when": when, "once": True, "timeout_s": 0.5, "on_timeout": "abort"}
    armed = arm(http, session, **asked)
    assert armed.pop("id").startswith("bp_")
    shown: dict[str, Any] = {"action": "pause", "edits": [], "probe": None, "point": "resid_post", "heads": []}
    shown |= {"features": None, "gate": None}
    assert armed == {**asked, "layers": [0, 3], **shown}
    by_default = arm(http, session)
    assert by_default["when"] == {"pass": "any", "position": None, "token_id": None, "every": None}
    assert (by_default["once"], by_default["timeout_s"], by_default["on_timeout"]) == (False, 600, "resume")


def test_edits_are_shown_without_their_numbers(http: httpx.Client, session: str) -> None:
    edits: list[dict[str, Any]] = [
        {"op": "add", "vector": [3, 4, *[0] * (HIDDEN - 2)], "positions": [2, 5], "max_norm": 1.5},
        {"op": "ablate", "positions": "last"},
        SCALE,
    ]
    shown = arm(http, session, action="edit", edits=edits)["edits"]
    absent = {"heads": None, "neurons": None, "experts": None, "keep_norm": False, "when": None, "feature": None}
    vector = {"size": HIDDEN, "norm": 5, "rows": None}
    assert shown[0] == {**edits[0], **absent, "factor": 1, "vector": vector}
    assert shown[1] == {**absent, **edits[1], "factor": None, "vector": None, "max_norm": None}
    assert (shown[2]["factor"], shown[2]["positions"]) == (2, "all")


def test_breakpoints_are_listed_in_order_and_removed(http: httpx.Client, session: str) -> None:
    assert http.get(f"{session}/breakpoints").json() == {"data": []}
    armed = [arm(http, session, layer=layer) for layer in (2, 0, 3)]
    assert http.get(f"{session}/breakpoints").json() == {"data": armed}
    path = f"{session}/breakpoints/{armed[1]['id']}"
    assert http.get(path).json() == armed[1]
    assert http.delete(path).status_code == 204
    assert_error(http.get(path), 404, "not_found", param="breakpoint_id")
    assert_error(http.delete(path), 404, "not_found", param="breakpoint_id")
    assert http.get(f"{session}/breakpoints").json() == {"data": [armed[0], armed[2]]}
    assert http.delete(f"{session}/breakpoints").status_code == 204
    assert http.get(f"{session}/breakpoints").json() == {"data": []}
    assert http.delete(f"{session}/breakpoints").status_code == 204


def test_a_breakpoint_can_be_armed_while_the_turn_runs(http: httpx.Client, session: str, slow_steps: None) -> None:
    with streaming(http, session, **{**TURN, "max_tokens": 900}) as stream:
        next(stream)
        armed = arm(http, session, when={"pass": "decode"})
        *_, last = stream
    assert (last.event, last.json()["checkpoint"]["breakpoint"]) == ("paused", armed["id"])


EDIT: dict[str, Any] = {"layer": 1, "action": "edit"}
BAD_EDITS: list[tuple[dict[str, Any], str, str]] = [
    ({"op": "scale"}, "factor", "scale needs it"),
    *(({"op": op}, "vector", f"{op} needs it") for op in ("add", "replace", "project_out")),
    ({**SCALE, "vector": ONES}, "vector", "goes with add, replace, project_out, clamp, ablate, not with scale"),
    ({"op": "add", "vector": ONES[1:]}, "vector", f"must have {HIDDEN} numbers, not {HIDDEN - 1}"),
    ({"op": "add", "vector": [*ONES[1:], -1e39]}, "vector.63", "from -3.4028234663852886e+38"),
    ({"op": "project_out", "vector": [0] * HIDDEN}, "vector", "from 1e-18 to 1e+18, not 0.0"),
    ({**SCALE, "positions": [3, 3]}, "positions", "lower than the end"),
    ({**SCALE, "heads": [0]}, "heads", "resid_post has no heads; q, k, v, q_rot, k_rot, z have"),
    ({**SCALE, "heads": [0], "neurons": [1]}, "neurons", "goes without heads"),
    ({**SCALE, "neurons": [2, 2]}, "neurons", "must rise"),
    ({**SCALE, "keep_norm": True, "max_norm": 1}, "max_norm", "goes without keep_norm"),
    ({**SCALE, "when": {"along": ONES}}, "when", "above, below or both"),
    ({**SCALE, "when": {"along": ONES, "above": 1, "below": 1}}, "when", "no number is between"),
    ({**SCALE, "when": {"along": ONES[1:], "above": 0}}, "when.along", f"must have {HIDDEN} numbers"),
    ({**SCALE, "when": {"along": ONES, "above": 1e39}}, "when.above", "the range of float32"),
    ({"op": "add", "vector": ONES, "orthogonal_to": [2] * HIDDEN}, "orthogonal_to", "nothing of it is left"),
    ({"op": "add", "vector": ONES, "orthogonal_to": [0] * HIDDEN}, "orthogonal_to", "it is zero"),
    ({**SCALE, "orthogonal_to": ONES}, "orthogonal_to", "goes with add, project_out, clamp, not with scale"),
    ({"op": "replace", "vector": ONES, "from": {"session": "x"}}, "vector", "goes without from"),
    ({"op": "clamp", "factor": 1, "from": {"session": "x"}}, "from", "goes with add, replace, ablate, not with clamp"),
]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"layer": 4}, "layer", "0 to 3"),
        ({"layer": 1, "layers": [2]}, "layer", "exactly one of layer and layers, not both"),
        ({"layer": None, "layers": [0, 2, 0]}, "layers.2", "twice"),
        ({"layer": None}, "layer", "exactly one of layer and layers, not none"),
        ({"point": "resid_past"}, "point", "no such point: there are embed, resid_pre, attn_in, q,"),
        ({"layer": None, "point": "blocks.\u0663.attn.hook_q"}, "point", "no such point"),
        ({"layer": None, "point": "q.03"}, "point", "no such point"),
        ({"point": "router_logits"}, "point", "no router_logits; its points are embed, resid_pre"),
        ({"point": "blocks.2.attn.hook_q"}, "layer", "leave it out, for point names one: blocks.2.attn.hook_q"),
        ({"point": "embed"}, "layer", "embed is a point of the model, and none of a layer"),
        ({"point": "pattern"}, "point", "cannot take action pause: it is computed from the queries and keys"),
        ({"point": "q", "heads": [0]}, "heads", "goes with action capture, not with pause"),
        ({"point": "mlp_post", "action": "capture", "heads": [0]}, "heads", "mlp_post has no heads"),
        ({"point": "z", "action": "capture", "heads": [99]}, "heads", "head 99 must be from 0 to"),
        ({"when": {"in_pass": "any"}}, "when.in_pass", "unknown field"),
        ({"when": {"position": 1024}}, "when.position", "0 to 1023"),
        ({"action": "capture", "timeout_s": 5}, "timeout_s", "goes with action pause or probe, not with capture"),
        ({"edits": [SCALE]}, "edits", "goes with action edit, not with pause"),
        ({"action": "edit"}, "edits", "needs 1 to 16"),
        *(({**EDIT, "edits": [SCALE, edit]}, f"edits.1.{field}", says) for edit, field, says in BAD_EDITS),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, session: str, body: dict[str, Any], param: str, says: str) -> None:
    answer = http.post(f"{session}/breakpoints", json={"layer": 1, "action": "pause", **body})
    message = assert_error(answer, 422, "field_out_of_range", param=param)
    assert param in message
    assert says in message
    assert http.get(f"{session}/breakpoints").json() == {"data": []}


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
    edits = {**EDIT, "layer": 0, "edits": [SCALE] * 2}
    for body in ({"layers": [0, 1], "action": "capture"}, edits, {**edits, "when": {"every": 2}}):
        answer = http.post(f"{session}/breakpoints", json=body)
        assert "257" in assert_error(answer, 422, "field_out_of_range", param="breakpoints")
    arm(http, session, layers=[0, 1, 2, 3])
    arm(http, session, action="capture")
    answer = http.post(f"{session}/breakpoints", json={"layer": 0, "action": "capture"})
    assert "at most 256" in assert_error(answer, 422, "field_out_of_range", param="breakpoints")
    assert len(http.get(f"{session}/breakpoints").json()["data"]) == 14

"""Points inside a layer over HTTP: listed, captured under their names, edited by head and neuron, and copied."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import CONTEXT, HIDDEN, LAYERS, arm, edit, generate, open_session, read, resume

POINTS = ["resid_pre", "q", "k_rot", "pattern", "z", "resid_mid", "mlp_post", "resid_post"]
PREFILL = {"pass": "prefill"}
Captured = dict[str, NDArray[np.float32]]


def watched(http: httpx.Client, *points: str, before: tuple[dict[str, Any], ...] = (), **fields: Any) -> Captured:
    """What a fresh session captures of its context at layer 1, after other breakpoints: by the points' names."""
    session, found = open_session(http), {}
    for each in (*before, *({"action": "capture", "point": point, "when": PREFILL, **fields} for point in points)):
        arm(http, session, **each)
    generate(http, session, max_tokens=1)
    content = http.get(f"{session}/captures", params={"layer": 1}).raise_for_status().content
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    for name, tensor in load(content).items():
        told = json.loads(metadata[name])
        assert name.endswith("layer1" if told["point"] == "resid_post" else f"layer1.{told['point']}")
        found[told["point"]] = tensor
    http.delete(session)
    return found


def listed(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in http.get("/v1/points").raise_for_status().json()["data"]}


def test_a_capture_has_the_name_and_the_shape_that_are_listed(http: httpx.Client) -> None:
    shapes, found = listed(http), watched(http, *POINTS)
    after = shapes["resid_post"]
    assert (after["layers"], after["width"], after["heads"]) == (list(range(LAYERS)), HIDDEN, None)
    assert (shapes["embed"]["layers"], bool(shapes["pattern"]["no_edit"])) == (None, True)
    for point in POINTS:
        width, heads = shapes[point]["width"], shapes[point]["heads"]
        each = (heads, CONTEXT if point == "pattern" else width // heads) if heads else (width,)
        assert found[point].shape == (CONTEXT, *each)
    np.testing.assert_allclose(found["pattern"].sum(-1), 1, atol=1e-5)
    assert not np.triu(found["pattern"].swapaxes(0, 1), 1).any(), "no query sees a key behind it"
    assert np.array_equal(watched(http, "blocks.1.attn.hook_z", layer=None)["z"], found["z"])
    assert np.array_equal(watched(http, "z", heads=[1])["z"], found["z"][:, [1]])


@pytest.mark.parametrize(
    ("point", "part", "index"),
    [("z", {"heads": [1]}, np.s_[:, 1]), ("mlp_post", {"neurons": [0, 5, 9]}, np.s_[:, [0, 5, 9]])],
)
def test_an_edit_changes_its_part_alone(http: httpx.Client, point: str, part: dict[str, Any], index: Any) -> None:
    plain = watched(http, point, "resid_post")
    change = {"point": point, "action": "edit", "edits": [{"op": "ablate", **part, "positions": [1, 3]}]}
    found = watched(http, point, "resid_post", before=(change,))
    wanted = plain[point].copy()
    wanted[1:3][index] = 0
    assert np.array_equal(found[point], wanted)
    assert (found["resid_post"] != plain["resid_post"]).any(1).tolist() == [False, True, True, False]


def test_what_another_session_keeps_is_patched_in(http: httpx.Client) -> None:
    """With all positions after layer 1 from another context, the layers above compute what they do for that."""
    clean, patched, third = (open_session(http) for _ in range(3))
    arm(http, clean, action="capture", when=PREFILL)
    other = generate(http, clean, token_ids=[5, 9, 300, 77], max_tokens=1)
    [kept] = load(http.get(f"{clean}/captures").content).values()
    kept_by = {"session": clean.rpartition("/")[2]}
    patch = {"op": "replace", "from": kept_by}
    shown = arm(http, patched, action="edit", edits=[patch])["edits"][0]
    assert (shown["vector"]["rows"], shown["positions"]) == (CONTEXT, [0, CONTEXT])
    assert generate(http, patched, max_tokens=1)["token_ids"] == other["token_ids"]
    arm(http, third, when=PREFILL)
    generate(http, third)
    before, source = read(http, third), {**kept_by, "layer": 1, "point": "hook_resid_post"}
    one = {"op": "replace", "from": {**source, "positions": [0, 1]}, "positions": [2, 4]}
    edit(http, third, one, {"op": "ablate", "from": source, "positions": [0, 1]}).raise_for_status()
    np.testing.assert_allclose(read(http, third), [kept.mean(0), before[1], kept[0], kept[0]], rtol=1e-6, atol=1e-6)
    for wrong, param, says in (
        ({"session": "ses_0"}, "session", "no session"),
        ({**source, "layer": 2}, "positions", "keeps nothing of resid_post of layer 2"),
        ({**source, "positions": [2, 9]}, "positions", "does not keep position 4 of resid_post of layer 1, but 0:4"),
        ({**source, "layer": 4}, "layer", "0 to 3"),
    ):
        answer = edit(http, third, {"op": "replace", "from": wrong})
        status, code = (404, "not_found") if param == "session" else (422, "field_out_of_range")
        assert says in assert_error(answer, status, code, param=f"edits.0.from.{param}")
    for session in (clean, patched, third):
        http.delete(session)


def test_an_edit_is_made_where_its_condition_holds_and_orthogonally(http: httpx.Client, session: str) -> None:
    arm(http, session, when=PREFILL)
    generate(http, session)
    before, along, other = read(http, session).astype(np.float64), np.linspace(-1, 1, HIDDEN), np.cos(np.arange(HIDDEN))
    bound = float(np.sort(before @ along)[1:3].mean())
    change = {"op": "add", "factor": 2, "vector": along.tolist(), "orthogonal_to": other.tolist()}
    edit(http, session, {**change, "when": {"along": along.tolist(), "above": bound}}).raise_for_status()
    added = 2 * (along - (along @ other) / (other @ other) * other)
    wanted = np.where((before @ along > bound)[:, None], before + added, before)
    np.testing.assert_allclose(read(http, session), wanted, rtol=1e-5, atol=1e-5)


def test_a_turn_pauses_inside_a_layer_and_goes_on_as_if_it_had_not(http: httpx.Client, session: str) -> None:
    whole = open_session(http)
    arm(http, session, point="mlp.hook_post", when=PREFILL)
    checkpoint, width = generate(http, session)["checkpoint"], listed(http)["mlp_post"]["width"]
    assert (checkpoint["point"], checkpoint["layer"], checkpoint["shape"]) == ("mlp_post", 1, [CONTEXT, width])
    refused = edit(http, session, {"op": "scale", "factor": 1, "neurons": [width]})
    assert_error(refused, 422, "field_out_of_range", param="edits.0.neurons")
    below = http.post(f"{session}/resume", json={"until": {"layer": 1, "point": "z"}})
    assert_error(below, 422, "field_out_of_range", param="until.layer")
    later = resume(http, session, until={"layer": 1, "point": "mlp_out"})["checkpoint"]
    assert (later["point"], later["layer"]) == ("mlp_out", 1)
    later = resume(http, session, until={"layer": 2, "point": "resid_mid"})["checkpoint"]
    assert (later["point"], later["layer"]) == ("resid_mid", 2)
    assert resume(http, session, until="end")["token_ids"] == generate(http, whole)["token_ids"]
    assert generate(http, session)["status"] == "paused", "the breakpoint was passed in that turn alone"
    http.delete(whole)


def test_a_file_keeps_points_and_parts(http: httpx.Client, session: str) -> None:
    condition = {"along": [1] * listed(http)["z"]["width"], "below": 0.5}
    edits = [{"op": "scale", "factor": 3, "heads": [1], "keep_norm": True}, {"op": "ablate", "when": condition}]
    armed = arm(http, session, point="z", action="edit", edits=edits)
    generate(http, session)
    content = http.get(f"{session}/export").raise_for_status().content
    copy = f"/v1/sessions/{http.post('/v1/sessions/import', content=content).raise_for_status().json()['id']}"
    assert http.get(f"{copy}/breakpoints").json()["data"] == [armed]
    assert generate(http, copy, token_ids=[3, 4])["token_ids"] == generate(http, session, token_ids=[3, 4])["token_ids"]
    http.delete(copy)

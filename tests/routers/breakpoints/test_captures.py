"""What breakpoints record, and the lens and the norms of many layers in one call."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    HIDDEN,
    LAYERS,
    TURN,
    arm,
    edit,
    generate,
    open_session,
    pause,
    unbroken,
)


def test_every_pass_is_recorded_and_the_turn_is_as_ever(http: httpx.Client, session: str) -> None:
    armed = arm(http, session, layers=[0, 2], action="capture")
    token_ids = generate(http, session)["token_ids"]
    assert token_ids == unbroken(http)
    computed = [*TURN["token_ids"], *token_ids][:-1]  # not the last token
    answer = http.get(f"{session}/captures")
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int.from_bytes(answer.content[:8], "little")
    about = json.loads(answer.content[8 : 8 + length])["__metadata__"]
    assert about.pop("dropped") == "0"
    assert sorted(about)[0] == f"00000.{armed['id']}.layer0"
    entries = [json.loads(about[name]) for name in sorted(about)]
    for layer in (0, 2):
        places = [entry for entry in entries if entry["layer"] == layer]
        assert {place["breakpoint"] for place in places} == {armed["id"]}
        assert [position for place in places for position in place["positions"]] == list(range(len(computed)))
        assert [token for place in places for token in place["token_ids"]] == computed
    for name, tensor in load(answer.content).items():
        assert tensor.shape == (len(json.loads(about[name])["positions"]), HIDDEN)
        assert np.isfinite(tensor).all()


ALL_LAYERS = list(range(LAYERS))


def lens_map(http: httpx.Client, session: str, **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"{session}/lens", params=query).raise_for_status().json()
    return found


def norms(http: httpx.Client, session: str, **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"{session}/norms", params=query).raise_for_status().json()
    return found


def capture(http: httpx.Client, session: str, **turn: Any) -> list[int]:
    """Capture all layers in a turn; returns the history."""
    arm(http, session, layers=ALL_LAYERS, action="capture")
    generate(http, session, **turn)
    history: list[int] = http.get(f"{session}/history").json()["token_ids"]
    return history


def test_each_layer_is_as_the_lens_of_a_pause_there(http: httpx.Client, session: str) -> None:
    history = capture(http, session)
    found = lens_map(http, session, positions="all", top_k=5)
    computed = len(history) - 1  # nothing has been computed for the token that was sampled last
    assert (found["first"], found["end"], found["kept_first"], found["kept_end"]) == (0, computed, 0, computed)
    assert found["token_ids"] == history[:computed]
    last = lens_map(http, session)
    assert (last["first"], last["end"], last["token_ids"]) == (computed - 1, computed, [history[-2]])
    assert [each["layer"] for each in found["layers"]] == ALL_LAYERS
    arm(http, other := open_session(http), layer=2)
    generate(http, other, token_ids=history[:computed])
    paused = http.get(f"{other}/checkpoint/lens", params={"positions": "all", "top_k": 5}).json()["positions"]
    for place, each in enumerate(paused):
        ids, logprobs = (found["layers"][2][name][place] for name in ("token_ids", "logprobs"))
        assert ids == [entry["token_id"] for entry in each["top"]]
        assert logprobs == pytest.approx([entry["logprob"] for entry in each["top"]], abs=1e-3)
        assert [found["texts"][str(token)] for token in ids] == [entry["text"] for entry in each["top"]]


def test_positions_that_are_not_kept_are_gaps(http: httpx.Client, session: str) -> None:
    arm(http, session, layers=[1], action="capture", when={"every": 2})
    generate(http, session, ignore_eos=True)
    found = lens_map(http, session, positions="0:4")
    assert [bool(each) for each in found["layers"][0]["token_ids"]] == [True, False, True, False]
    lengths = norms(http, session, positions="0:4")["layers"][0]["norms"]
    assert [each is not None for each in lengths] == [True, False, True, False]


def test_what_has_no_length_has_no_direction(http: httpx.Client, session: str) -> None:
    nothing = norms(http, session)
    assert (nothing["kept_end"], nothing["token_ids"], nothing["layers"]) == (0, [], [])
    pause(http, session)
    edit(http, session, {"op": "ablate", "positions": "last"}).raise_for_status()
    for name, vector in (("up", np.ones(HIDDEN, np.float32)), ("zero", np.zeros(HIDDEN, np.float32))):
        http.post("/v1/vectors", params={"name": name}, content=save({"v": vector})).raise_for_status()
    (layer,) = norms(http, session, vector="up")["layers"]
    assert (layer["norms"], layer["cosines"]) == ([0.0], [None])
    for name, status, code in (("zero", 422, "field_out_of_range"), ("none", 404, "not_found")):
        assert_error(http.get(f"{session}/norms", params={"vector": name}), status, code, param="vector")
    for name in ("up", "zero"):
        http.delete(f"/v1/vectors/{name}")


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ({"positions": "0:100"}, "positions", "within 0:"),
        ({"layers": "0:5"}, "layers", "from 0 to 3"),
        ({"layers": "3:3"}, "layers", "first lower than end"),
        ({"layers": ""}, "layers", "first:end"),
    ],
)
@pytest.mark.parametrize("what", ["lens", "norms"])
def test_what_is_asked_for_must_be_there(
    http: httpx.Client, session: str, what: str, query: dict[str, str], param: str, message: str
) -> None:
    generate(http, session, ignore_eos=True)
    refused = http.get(f"{session}/{what}", params=query)
    assert message in assert_error(refused, 422, "field_out_of_range", param=param)


def test_a_map_has_at_most_64_positions(http: httpx.Client, session: str) -> None:
    capture(http, session, token_ids=[5] * 70, max_tokens=0)
    for positions in ("all", "0:65"):
        refused = http.get(f"{session}/lens", params={"positions": positions})
        assert "0:70 are kept" in assert_error(refused, 422, "field_out_of_range", param="positions")
    assert len(lens_map(http, session, positions="6:70")["token_ids"]) == 64
    assert_error(http.get(f"{session}/lens", params={"top_k": 6}), 422, "field_out_of_range", param="top_k")

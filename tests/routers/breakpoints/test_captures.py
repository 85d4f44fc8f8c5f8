"""What breakpoints record, and the lens and the norms of many layers in one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load, save

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    CONTEXT,
    HIDDEN,
    LAYERS,
    TURN,
    arm,
    edit,
    generate,
    pause,
    read,
    resume,
    unbroken,
)

Entry = tuple[dict[str, Any], NDArray[np.float32]]


def captures(http: httpx.Client, session: str, tmp_path: Path) -> tuple[list[Entry], dict[str, str]]:
    """What was recorded, by name, each with what the file says of it; and the file's metadata."""
    answer = http.get(f"{session}/captures").raise_for_status()
    assert answer.headers["content-type"] == "application/octet-stream"
    (tmp_path / "captures").write_bytes(answer.content)
    with safe_open(tmp_path / "captures", "numpy") as file:
        metadata = file.metadata()
        return [(json.loads(metadata[name]), file.get_tensor(name)) for name in sorted(file.keys())], metadata


def test_every_pass_is_recorded_and_the_turn_is_as_ever(http: httpx.Client, session: str, tmp_path: Path) -> None:
    armed = arm(http, session, layers=[0, 2], action="capture")
    token_ids = generate(http, session)["token_ids"]
    assert token_ids == unbroken(http)
    history = [*TURN["token_ids"], *token_ids]
    found, metadata = captures(http, session, tmp_path)
    assert metadata["dropped"] == "0"
    assert sorted(metadata)[0] == f"00000.{armed['id']}.layer0"
    for layer in (0, 2):
        entries = [entry for entry in found if entry[0]["layer"] == layer]
        assert [place["breakpoint"] for place, _ in entries] == [armed["id"]] * len(entries)
        positions = [position for place, _ in entries for position in place["positions"]]
        assert positions == list(range(len(history) - 1))  # the last token has not been computed
        assert [token for place, _ in entries for token in place["token_ids"]] == history[:-1]
        for place, tensor in entries:
            assert tensor.shape == (len(place["positions"]), HIDDEN)
            assert np.isfinite(tensor).all()


def test_only_positions_that_are_asked_for_are_recorded(http: httpx.Client, session: str, tmp_path: Path) -> None:
    assert captures(http, session, tmp_path) == ([], {"dropped": "0"})
    arm(http, session, action="capture", when={"every": 3})
    generate(http, session)
    found, _ = captures(http, session, tmp_path)
    assert [place["positions"] for place, _ in found] == [[0, 3], [6]]
    assert http.delete(f"{session}/captures").status_code == 204
    assert captures(http, session, tmp_path) == ([], {"dropped": "0"})
    assert http.get(f"{session}/breakpoints").json()["data"]


def test_a_capture_is_what_a_pause_shows(http: httpx.Client, session: str, tmp_path: Path) -> None:
    arm(http, session, action="capture", once=True)
    pause(http, session, layer=1)
    ((place, tensor),), _ = captures(http, session, tmp_path)
    assert place["positions"] == [0, 1, 2, 3]
    assert np.array_equal(tensor, read(http, session))


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
    generate(http, session, ignore_eos=True, **turn)
    history: list[int] = http.get(f"{session}/history").json()["token_ids"]
    return history


def recorded(http: httpx.Client, session: str) -> dict[int, NDArray[np.float32]]:
    """What each layer has captured, in the order of positions."""
    parts: dict[int, list[NDArray[np.float32]]] = {}
    for name, tensor in sorted(load(http.get(f"{session}/captures").content).items()):
        parts.setdefault(int(name.rpartition("layer")[2]), []).append(tensor)
    return {layer: np.concatenate(tensors) for layer, tensors in parts.items()}


def test_each_layer_is_as_the_lens_of_a_pause_there(http: httpx.Client, session: str) -> None:
    history = capture(http, session)
    found = lens_map(http, session, positions="all", top_k=5)
    computed = len(history) - 1  # nothing has been computed for the token that was sampled last
    assert (found["first"], found["end"], found["kept_first"], found["kept_end"]) == (0, computed, 0, computed)
    assert found["token_ids"] == history[:computed]
    last = lens_map(http, session)
    assert (last["first"], last["end"], last["token_ids"]) == (computed - 1, computed, [history[-2]])
    assert [each["layer"] for each in found["layers"]] == ALL_LAYERS
    http.delete(f"{session}/breakpoints")
    for layer in ALL_LAYERS:
        other = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
        arm(http, other, layer=layer)
        http.post(f"{other}/generate", json={"token_ids": history[:computed], "max_tokens": 1}).raise_for_status()
        single = http.get(f"{other}/checkpoint/lens", params={"positions": "all", "top_k": 5}).json()["positions"]
        for place, each in enumerate(single):
            ids, logprobs = (found["layers"][layer][name][place] for name in ("token_ids", "logprobs"))
            assert ids == [entry["token_id"] for entry in each["top"]]
            assert logprobs == pytest.approx([entry["logprob"] for entry in each["top"]], abs=1e-3)
            assert [found["texts"][str(token)] for token in ids] == [entry["text"] for entry in each["top"]]
        http.delete(other)


def test_a_paused_session_shows_the_layers_below_and_where_it_stands(http: httpx.Client, session: str) -> None:
    arm(http, session, layers=[0], action="capture")
    pause(http, session, layer=2)
    found = lens_map(http, session, positions="all")
    assert [each["layer"] for each in found["layers"]] == [0, 2]
    before = found["layers"][1]
    edit(http, session, {"op": "scale", "factor": -3.0}).raise_for_status()
    after = lens_map(http, session, positions="all", layers="2")["layers"]
    assert [each["layer"] for each in after] == [2]
    assert after[0]["logprobs"] != before["logprobs"]
    single = http.get(f"{session}/checkpoint/lens", params={"positions": "all", "top_k": 1}).json()["positions"]
    assert after[0]["token_ids"] == [[each["top"][0]["token_id"]] for each in single]
    resume(http, session, until="end")
    assert [each["layer"] for each in lens_map(http, session, positions="all")["layers"]] == [0]


def test_positions_that_are_not_kept_are_gaps(http: httpx.Client, session: str) -> None:
    arm(http, session, layers=[1], action="capture", when={"every": 2})
    generate(http, session, ignore_eos=True)
    found = lens_map(http, session, positions="0:4")
    assert [bool(each) for each in found["layers"][0]["token_ids"]] == [True, False, True, False]
    assert [each is not None for each in norms(http, session, positions="0:4")["layers"][0]["norms"]] == [
        True,
        False,
        True,
        False,
    ]


def test_norms_and_cosines_are_those_of_the_captures(http: httpx.Client, session: str) -> None:
    capture(http, session)
    tensors = recorded(http, session)
    vector = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    http.post("/v1/vectors", params={"name": "compass"}, content=save({"v": vector})).raise_for_status()
    found = norms(http, session, positions="all", vector="compass")
    for layer in ALL_LAYERS:
        lengths = np.linalg.norm(tensors[layer], axis=1)
        assert found["layers"][layer]["norms"] == pytest.approx(lengths.tolist(), rel=1e-5)
        wanted = tensors[layer] @ vector / lengths / np.linalg.norm(vector)
        assert found["layers"][layer]["cosines"] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert all(each["cosines"] is None for each in norms(http, session)["layers"])
    http.delete("/v1/vectors/compass")


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
        ({"positions": "first"}, "positions", "last, all, or first:end"),
        ({"positions": "0:100"}, "positions", "within 0:"),
        ({"layers": "4"}, "layers", "from 0 to 3"),
        ({"layers": "0:5"}, "layers", "from 0 to 3"),
        ({"layers": "3:3"}, "layers", "first lower than end"),
        ({"layers": "1,"}, "layers", "first:end"),
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


def test_a_map_is_read_while_the_session_goes_on(http: httpx.Client, session: str) -> None:
    """What was captured in a turn before can be read during the next one."""
    history = capture(http, session)
    length = len(history) - 1
    turn = {**TURN, "token_ids": [9], "max_tokens": 200, "stream": True, "ignore_eos": True}
    with http.stream("POST", f"{session}/generate", json=turn) as stream:
        next(stream.iter_lines())
        found = lens_map(http, session, positions=f"0:{length}")
        stream.close()
    assert found["token_ids"] == history[:length]
    assert length >= CONTEXT

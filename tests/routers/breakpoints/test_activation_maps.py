"""The lens and the norms of many layers in one call, of sessions that are paused and that are not."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from app.domain.activations import ActivationMap, MapLayer
from app.sessions.whitebox.activation_maps import LensMap
from app.wire.activation_maps import LensMapView
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import CONTEXT, HIDDEN, LAYERS, TURN, arm, edit, generate, pause, resume

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


def test_the_last_position_is_the_default(http: httpx.Client, session: str) -> None:
    history = capture(http, session)
    found = lens_map(http, session)
    assert (found["first"], found["end"], found["token_ids"]) == (len(history) - 2, len(history) - 1, [history[-2]])
    assert [len(each["token_ids"]) for each in found["layers"]] == [1] * LAYERS


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


def test_nothing_is_kept_of_a_session_that_was_not_asked_to(http: httpx.Client, session: str) -> None:
    generate(http, session, ignore_eos=True)
    for found in (lens_map(http, session, positions="all"), norms(http, session)):
        assert (found["first"], found["end"], found["kept_end"]) == (0, 0, 0)
        assert (found["token_ids"], found["layers"]) == ([], [])


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


def test_a_row_of_zeros_has_no_direction(http: httpx.Client, session: str) -> None:
    pause(http, session)
    edit(http, session, {"op": "ablate", "positions": "last"}).raise_for_status()
    http.post("/v1/vectors", params={"name": "up"}, content=save({"v": np.ones(HIDDEN, np.float32)})).raise_for_status()
    (layer,) = norms(http, session, vector="up")["layers"]
    assert (layer["norms"], layer["cosines"]) == ([0.0], [None])
    http.delete("/v1/vectors/up")


def test_a_vector_must_be_there_and_have_a_direction(http: httpx.Client, session: str) -> None:
    assert_error(http.get(f"{session}/norms", params={"vector": "none"}), 404, "not_found", param="vector")
    assert_error(http.get(f"{session}/norms", params={"vector": "a b"}), 422, "field_out_of_range", param="vector")
    zeros = save({"v": np.zeros(HIDDEN, np.float32)})
    http.post("/v1/vectors", params={"name": "zero"}, content=zeros).raise_for_status()
    refused = http.get(f"{session}/norms", params={"vector": "zero"})
    assert_error(refused, 422, "field_out_of_range", param="vector")
    http.delete("/v1/vectors/zero")


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


def test_64_positions_of_30_layers_take_less_than_100_kb() -> None:
    """With the longest token ids that there are, each another one."""

    class Words:
        def token_text(self, token_id: int) -> str:
            return f" token{token_id % 97}"

    positions = tuple(range(4000, 4064))
    layers = tuple(MapLayer(layer, positions) for layer in range(30))
    tops = tuple(((200_000 + k, -k / 97),) for k in range(64 * 30))
    found = LensMap(ActivationMap(4000, 4064, 0, 4064, tuple(range(100_000, 100_064)), layers), tops)
    assert len(LensMapView.of(found, Words()).model_dump_json()) < 100_000  # type: ignore[arg-type]


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

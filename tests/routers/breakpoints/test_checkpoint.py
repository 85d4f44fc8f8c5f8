"""What a paused turn has left, read: the checkpoint, the residual stream, the logit lens."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save
from safetensors.torch import load as load_torch

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import HIDDEN, arm, edit, generate, pause, read, without_age, write


def test_there_is_nothing_to_see_of_a_session_that_is_not_paused(http: httpx.Client, session: str) -> None:
    for answer in (
        http.get(f"{session}/checkpoint"),
        http.get(f"{session}/checkpoint/activation"),
        write(http, session, save({"activation": np.zeros((4, HIDDEN), np.float32)})),
        edit(http, session, {"op": "ablate"}),
        http.get(f"{session}/checkpoint/lens"),
    ):
        message = assert_error(answer, 409, "wrong_state")
        assert "is idle, it must be paused" in message
    assert http.get(session).json()["checkpoint"] is None


def test_the_checkpoint_has_an_age(http: httpx.Client, session: str) -> None:
    paused = pause(http, session)
    time.sleep(0.1)
    later = http.get(f"{session}/checkpoint").json()
    assert without_age(later) == without_age(paused)
    assert 0 <= paused["age_s"] <= later["age_s"] - 0.1
    assert later["age_s"] == pytest.approx(time.time() - later["created_at"], abs=1)


def test_the_activation_comes_as_safetensors(http: httpx.Client, session: str, tmp_path: Path) -> None:
    checkpoint = pause(http, session)
    answer = http.get(f"{session}/checkpoint/activation")
    assert answer.headers["content-type"] == "application/octet-stream"
    (tmp_path / "activation").write_bytes(answer.content)
    with safe_open(tmp_path / "activation", "numpy") as file:
        assert list(file.keys()) == ["activation"]
        assert file.metadata() == {"layer": "1", "first": "0", "end": "4"}
        activation = file.get_tensor("activation")
    assert (activation.shape, activation.dtype, activation.nbytes) == ((4, HIDDEN), np.float32, checkpoint["bytes"])
    assert np.isfinite(activation).all()
    assert activation.any(axis=1).all()


def test_the_activation_comes_as_json_to_whoever_asks(http: httpx.Client, session: str) -> None:
    pause(http, session)
    path = f"{session}/checkpoint/activation"
    found = http.get(path, headers={"Accept": "application/json"})
    assert found.headers["content-type"] == "application/json"
    values = found.json().pop("values")
    assert {**found.json(), "values": None} == {"layer": 1, "first": 0, "end": 4, "dtype": "float32", "values": None}
    assert np.array_equal(np.array(values, np.float32), read(http, session))
    for file in ("application/vnd.safetensors", "application/octet-stream"):
        both = http.get(path, headers={"Accept": f"{file}, application/json;q=0.5"})
        assert both.headers["content-type"] == file


@pytest.mark.parametrize(("positions", "rows"), [("all", slice(0, 4)), ("last", slice(3, 4)), ("1:3", slice(1, 3))])
def test_positions_can_be_chosen(http: httpx.Client, session: str, positions: str, rows: slice) -> None:
    pause(http, session)
    assert np.array_equal(read(http, session, positions), read(http, session)[rows])
    found = http.get(
        f"{session}/checkpoint/activation", params={"positions": positions}, headers={"Accept": "application/json"}
    ).json()
    assert (found["first"], found["end"]) == (rows.start, rows.stop)


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        ("2", "last, all, or first:end"),
        ("2:2", "first lower than end"),
        ("-1:2", "last, all, or first:end"),
        ("", "last, all, or first:end"),
        ("1:5", "within 0:4"),
        ("1:9999999999", "last, all, or first:end"),
    ],
)
@pytest.mark.parametrize("what", ["activation", "lens"])
def test_positions_must_be_there(http: httpx.Client, session: str, what: str, positions: str, says: str) -> None:
    pause(http, session)
    answer = http.get(f"{session}/checkpoint/{what}", params={"positions": positions})
    assert says in assert_error(answer, 422, "field_out_of_range", param="positions")


def test_after_the_last_layer_the_lens_shows_what_the_model_says(http: httpx.Client, session: str) -> None:
    said = generate(http, session, logprobs=20)["logprobs"][0]
    http.post(f"{session}/rewind", json={"to_token": 0}).raise_for_status()
    pause(http, session, layer=3)
    lens = http.get(f"{session}/checkpoint/lens", params={"top_k": 20}).json()
    assert lens["layer"] == 3
    (found,) = lens["positions"]
    assert (found["position"], found["token_id"]) == (3, 8)
    assert [entry["token_id"] for entry in found["top"]] == [entry["token_id"] for entry in said["top"]]
    for seen, expected in zip(found["top"], said["top"], strict=True):
        assert seen["logprob"] == pytest.approx(expected["logprob"], abs=1e-4)


def test_the_lens_shows_what_is_asked_for(http: httpx.Client, session: str) -> None:
    pause(http, session)
    lens = http.get(f"{session}/checkpoint/lens", params={"positions": "1:3", "top_k": 2}).json()
    assert [(found["position"], found["token_id"]) for found in lens["positions"]] == [(1, 6), (2, 7)]
    for found in lens["positions"]:
        assert len(found["top"]) == 2
        assert 0 > found["top"][0]["logprob"] >= found["top"][1]["logprob"]
        assert all(isinstance(entry["text"], str) for entry in found["top"])
    assert len(http.get(f"{session}/checkpoint/lens").json()["positions"][0]["top"]) == 5


def test_the_lens_is_for_64_positions_at_once(http: httpx.Client, session: str) -> None:
    arm(http, session)
    assert generate(http, session, token_ids=[5] * 100)["status"] == "paused"
    path = f"{session}/checkpoint/lens"
    for positions in ("all", "0:65", "30:100"):
        message = assert_error(
            http.get(path, params={"positions": positions}), 422, "field_out_of_range", param="positions"
        )
        assert "1 to 64 of the checkpoint's 0:100" in message
    found = http.get(path, params={"positions": "36:100"}).raise_for_status().json()["positions"]
    assert [each["position"] for each in found] == list(range(36, 100))
    for top_k in ("0", "21", "x"):
        assert_error(http.get(path, params={"top_k": top_k}), 422, "field_out_of_range", param="top_k")


def test_bfloat16_stays_bfloat16(serve_with: ServeWith) -> None:
    http = serve_with(dtype="bfloat16")
    session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    checkpoint = pause(http, session)
    assert (checkpoint["dtype"], checkpoint["bytes"]) == ("bfloat16", 4 * HIDDEN * 2)
    content = http.get(f"{session}/checkpoint/activation").content
    assert_error(
        write(http, session, save({"activation": np.ones((4, HIDDEN), np.float32)})),
        422,
        "field_out_of_range",
        param="dtype",
    )
    assert write(http, session, content).status_code == 200
    values = http.get(f"{session}/checkpoint/activation", headers={"Accept": "application/json"}).json()["values"]
    assert torch.equal(load_torch(content)["activation"].float(), torch.tensor(values))

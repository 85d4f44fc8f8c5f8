"""What a paused turn has left: read, written back and edited, or refused and left as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save
from safetensors.torch import load as load_torch
from safetensors.torch import save as save_torch

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    HIDDEN,
    arm,
    edit,
    generate,
    pause,
    read,
    resume,
    unbroken,
    without_age,
    write,
)


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


SCALE: dict[str, Any] = {"op": "scale", "factor": 2}


def test_what_is_written_back_is_what_goes_on(http: httpx.Client, session: str) -> None:
    expected = unbroken(http)
    pause(http, session)
    before = http.get(f"{session}/checkpoint/activation").content
    changed = np.flip(read(http, session), axis=1).copy()
    answer = write(http, session, save({"activation": changed}))
    assert answer.status_code == 200, answer.text
    assert without_age(answer.json()) == without_age(http.get(f"{session}/checkpoint").json())
    assert np.array_equal(read(http, session), changed)
    assert write(http, session, before).status_code == 200
    assert resume(http, session, until="end")["token_ids"] == expected
    http.post(f"{session}/rewind", json={"to_token": 0}).raise_for_status()
    assert generate(http, session)["status"] == "paused"
    write(http, session, save({"activation": changed})).raise_for_status()
    assert resume(http, session, until="end")["token_ids"] != expected


STREAM = np.ones((4, HIDDEN), np.float32)


def with_one(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    changed = STREAM.copy()
    changed[2, 5] = value
    return changed


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        (save({"activation": STREAM[:3]}), "shape", "[4, 64], not [3, 64]"),
        (save({"activation": STREAM[:, :63].copy()}), "shape", "[4, 64], not [4, 63]"),
        (save({"activation": STREAM.reshape(-1)}), "shape", "[4, 64], not [256]"),
        (save({"activation": STREAM[None]}), "shape", "[4, 64], not [1, 4, 64]"),
        (save({"activation": STREAM.astype(np.float16)}), "dtype", "float32, not float16"),
        (save_torch({"activation": torch.ones(4, HIDDEN).bfloat16()}), "dtype", "float32, not bfloat16"),
        (save({"activation": STREAM.astype(np.float64)}), "dtype", "F64"),
        (save({"activation": with_one(np.nan)}), "activation", "element 133 is not finite"),
        (save({"activation": with_one(np.inf)}), "activation", "element 133 is not finite"),
        (save({"hidden": STREAM}), "activation", "not hidden"),
        (save({"activation": STREAM, "more": STREAM}), "activation", "1 tensor, not 2"),
        (save({}), "activation", "1 tensor, not 0"),
        (save({"activation": STREAM}, {"layer": "2"}), "layer", "it is 1 here, not 2"),
        (save({"activation": STREAM}, {"first": "4", "end": "8"}), "first", "it is 0 here, not 4"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    http: httpx.Client, session: str, content: bytes, param: str, says: str
) -> None:
    pause(http, session)
    before = read(http, session)
    assert says in assert_error(write(http, session, content), 422, "field_out_of_range", param=param)
    assert np.array_equal(read(http, session), before)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"[[1.0]]", save({"activation": STREAM})[:-4]])
def test_what_is_no_file_is_malformed(http: httpx.Client, session: str, content: bytes) -> None:
    pause(http, session)
    assert "safetensors" in assert_error(write(http, session, content), 400, "malformed_request", param="body")


def test_what_is_too_large_is_refused_before_it_is_read(serve_with: ServeWith) -> None:
    http = serve_with(max_request_bytes=4096)
    session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    pause(http, session)
    content = save({"activation": np.ones((64, HIDDEN), np.float32)})
    assert "4096" in assert_error(write(http, session, content), 413, "request_too_large")
    assert write(http, session, save({"activation": STREAM})).status_code == 200


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (SCALE, lambda h: 2 * h),
        ({"op": "ablate"}, lambda h: 0 * h),
        ({"op": "add", "vector": [1] * HIDDEN, "factor": 3}, lambda h: h + 3),
        ({"op": "add", "vector": [1] * HIDDEN}, lambda h: h + 1),
        ({"op": "replace", "vector": [0.5] * HIDDEN}, lambda h: 0 * h + 0.5),
        ({"op": "replace", "vector": [0] * HIDDEN}, lambda h: 0 * h),
        ({"op": "add", "vector": [1] * HIDDEN, "max_norm": 4}, lambda h: h + 0.5),
        ({"op": "add", "vector": [1] * HIDDEN, "max_norm": 9}, lambda h: h + 1),
    ],
)
def test_an_edit_changes_every_position_or_those_it_names(
    http: httpx.Client, session: str, change: dict[str, Any], expected: Callable[[Any], Any]
) -> None:
    pause(http, session)
    before = read(http, session)
    answer = edit(http, session, {**change, "positions": [1, 3]}, {**change, "positions": "last"})
    assert without_age(answer.json()) == without_age(http.get(f"{session}/checkpoint").json())
    after = read(http, session)
    assert np.array_equal(after[0], before[0])
    assert np.allclose(after[1:], expected(before)[1:], rtol=1e-5, atol=1e-5)
    edit(http, session, {"op": "replace", "vector": [1] * HIDDEN}).raise_for_status()
    assert (read(http, session) == 1).all()


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"op": "add", "vector": [1]}, "edits.1.vector", "must have 64 numbers, not 1"),
        ({**SCALE, "positions": [2, 5]}, "edits.1.positions", "within 0:4"),
        ({**SCALE, "positions": [9, 12]}, "edits.1.positions", "within 0:4"),
        ({"op": "ablate", "factor": 2}, "edits.1.factor", "not with ablate"),
    ],
)
def test_a_bad_edit_of_a_checkpoint_changes_nothing(
    http: httpx.Client, session: str, change: dict[str, Any], param: str, says: str
) -> None:
    pause(http, session)
    before = read(http, session)
    assert says in assert_error(edit(http, session, SCALE, change), 422, "field_out_of_range", param=param)
    assert np.array_equal(read(http, session), before)


def test_a_checkpoint_needs_edits_to_be_edited(http: httpx.Client, session: str) -> None:
    pause(http, session)
    assert_error(http.post(f"{session}/checkpoint/edit", json={}), 422, "field_out_of_range", param="edits")
    assert_error(edit(http, session), 422, "field_out_of_range", param="edits")
    unknown = edit(http, session, {"op": "add", "vector": "nobody.uploaded-this"})
    assert_error(unknown, 404, "not_found", param="vector")


def test_edits_are_made_all_or_none(http: httpx.Client, session: str) -> None:
    """The last would be infinite."""
    pause(http, session)
    before = read(http, session)
    answer = edit(http, session, SCALE, *[{"op": "scale", "factor": 1e6}] * 8)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"].startswith("edits")
    assert np.array_equal(read(http, session), before)

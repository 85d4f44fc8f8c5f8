"""What a paused turn has left: read, written back and edited, or refused and left as it was."""

from __future__ import annotations

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

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    HIDDEN,
    arm,
    edit,
    generate,
    open_session,
    pause,
    read,
    without_age,
    write,
)


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
    found = http.get(path, params={"positions": "1:3"}, headers={"Accept": "application/json"})
    assert found.headers["content-type"] == "application/json"
    values = found.json()["values"]
    assert found.json() == {"layer": 1, "first": 1, "end": 3, "dtype": "float32", "values": values}
    assert np.array_equal(np.array(values, np.float32), read(http, session)[1:3])
    for file in ("application/vnd.safetensors", "application/octet-stream"):
        both = http.get(path, headers={"Accept": f"{file}, application/json;q=0.5"})
        assert both.headers["content-type"] == file


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        ("2", "last, all, or first:end"),
        ("2:2", "first lower than end"),
        ("", "last, all, or first:end"),
        ("1:5", "within 0:4"),
    ],
)
@pytest.mark.parametrize("what", ["activation", "lens"])
def test_positions_must_be_there(http: httpx.Client, session: str, what: str, positions: str, says: str) -> None:
    pause(http, session)
    answer = http.get(f"{session}/checkpoint/{what}", params={"positions": positions})
    assert says in assert_error(answer, 422, "field_out_of_range", param="positions")


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
    assert [(each["position"], each["token_id"]) for each in found] == [(position, 5) for position in range(36, 100)]
    (last,) = http.get(path).json()["positions"]
    assert [isinstance(entry["text"], str) for entry in last["top"]] == [True] * 5
    for top_k in ("0", "21", "x"):
        assert_error(http.get(path, params={"top_k": top_k}), 422, "field_out_of_range", param="top_k")


def test_bfloat16_stays_bfloat16(serve_with: ServeWith) -> None:
    http = serve_with(dtype="bfloat16")
    session = open_session(http)
    checkpoint = pause(http, session)
    assert (checkpoint["dtype"], checkpoint["bytes"]) == ("bfloat16", 4 * HIDDEN * 2)
    content = http.get(f"{session}/checkpoint/activation").content
    refused = write(http, session, save({"activation": np.ones((4, HIDDEN), np.float32)}))
    assert_error(refused, 422, "field_out_of_range", param="dtype")
    assert write(http, session, content).status_code == 200
    values = http.get(f"{session}/checkpoint/activation", headers={"Accept": "application/json"}).json()["values"]
    assert torch.equal(load_torch(content)["activation"].float(), torch.tensor(values))


SCALE: dict[str, Any] = {"op": "scale", "factor": 2}
STREAM = np.ones((4, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        (save({"activation": STREAM[:3]}), "shape", "[4, 64], not [3, 64]"),
        (save({"activation": STREAM.astype(np.float16)}), "dtype", "float32, not float16"),
        (save({"activation": np.full_like(STREAM, np.inf)}), "activation", "element 0 is not finite"),
        (save({"hidden": STREAM}), "activation", "not hidden"),
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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (SCALE, lambda h: 2 * h),
        ({"op": "ablate"}, lambda h: 0 * h),
        ({"op": "add", "vector": [1] * HIDDEN, "max_norm": 4}, lambda h: h + 0.5),
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

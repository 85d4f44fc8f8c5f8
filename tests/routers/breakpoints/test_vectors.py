"""Named steering vectors: uploaded, used, replaced, refused."""

import math
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from safetensors.torch import load as load_torch
from safetensors.torch import save as save_torch

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import HIDDEN, arm, generate, open_session, pause, read

VECTOR = np.linspace(-1, 1, HIDDEN, dtype=np.float32)


@pytest.fixture
def name(http: httpx.Client) -> Iterator[str]:
    """A name that is free again after the test."""
    yield "happy-1.0_x"
    http.delete("/v1/vectors/happy-1.0_x")


def upload(http: httpx.Client, name: str, content: bytes) -> httpx.Response:
    return http.post("/v1/vectors", params={"name": name}, content=content)


def test_a_vector_is_kept_under_its_name(http: httpx.Client, name: str) -> None:
    answer = upload(http, name, save({"direction": VECTOR}))
    assert answer.status_code == 201
    shown, norm = answer.json(), pytest.approx(math.hypot(*VECTOR.tolist()))
    upload(http, name, save({"direction": 2 * VECTOR})).raise_for_status()
    assert np.array_equal(load(http.get(f"/v1/vectors/{name}").content)["vector"], 2 * VECTOR), "the last one counts"
    assert upload(http, name, save({"direction": VECTOR})).json() == shown
    assert shown == {"name": name, "size": HIDDEN, "dtype": "float32", "norm": norm}
    assert http.get("/v1/vectors").json() == {"data": [shown]}
    found = http.get(f"/v1/vectors/{name}")
    assert found.headers["content-type"] == "application/octet-stream"
    assert np.array_equal(load(found.content)["vector"], VECTOR)
    assert http.delete(f"/v1/vectors/{name}").status_code == 204
    assert http.get("/v1/vectors").json() == {"data": []}
    assert_error(http.get(f"/v1/vectors/{name}"), 404, "not_found", param="vector")
    assert_error(http.delete(f"/v1/vectors/{name}"), 404, "not_found", param="vector")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_vector_keeps_its_type(http: httpx.Client, session: str, name: str, dtype: torch.dtype) -> None:
    vector = torch.from_numpy(VECTOR.copy()).to(dtype)
    upload(http, name, save_torch({"v": vector})).raise_for_status()
    found = load_torch(http.get(f"/v1/vectors/{name}").content)["vector"]
    assert found.dtype is dtype
    assert torch.equal(found, vector)
    pause(http, session)
    body = {"edits": [{"op": "replace", "vector": name}]}
    http.post(f"{session}/checkpoint/edit", json=body).raise_for_status()
    assert np.array_equal(read(http, session), np.tile(vector.float().numpy(), (4, 1)))


def test_an_armed_edit_is_of_the_numbers_that_its_vector_had(http: httpx.Client, session: str, name: str) -> None:
    def says(vector: object = None) -> list[int]:
        http.post(f"{session}/rewind", json={"to_token": 0}).raise_for_status()
        if vector is not None:
            http.delete(f"{session}/breakpoints").raise_for_status()
            arm(http, session, action="edit", edits=[{"op": "add", "vector": vector, "factor": 40}])
        token_ids: list[int] = generate(http, session)["token_ids"]
        return token_ids

    upload(http, name, save({"v": VECTOR})).raise_for_status()
    unsteered = says()
    assert unsteered != says(VECTOR.tolist()) == says(name)
    expected = says()
    upload(http, name, save({"v": -VECTOR})).raise_for_status()
    assert says() == expected
    http.delete(f"/v1/vectors/{name}").raise_for_status()
    assert says() == expected


@pytest.mark.parametrize("bad", [None, "a/b", "v" * 65, ".."])
def test_a_name_must_be_one_that_a_url_can_hold(http: httpx.Client, bad: str | None) -> None:
    answer = http.post("/v1/vectors", params={} if bad is None else {"name": bad}, content=save({"v": VECTOR}))
    assert_error(answer, 422, "field_out_of_range", param="name")
    assert http.get("/v1/vectors").json() == {"data": []}


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        (save({"v": np.tile(VECTOR, (2, 1))}), "shape", "not [2, 64]"),
        (save({"v": VECTOR.astype(np.float64)}), "dtype", "F64 must be one of F32, BF16, F16"),
        (save({"v": np.full_like(VECTOR, np.nan)}), "vector", "element 0 is not finite"),
    ],
)
def test_what_is_no_vector_is_refused(http: httpx.Client, name: str, content: bytes, param: str, says: str) -> None:
    assert says in assert_error(upload(http, name, content), 422, "field_out_of_range", param=param)
    assert_error(upload(http, name, b"1, 2, 3"), 400, "malformed_request", param="body")
    assert http.get("/v1/vectors").json() == {"data": []}


def test_vectors_belong_to_a_key(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("one", "two"))
    http.headers["Authorization"] = "Bearer one"
    upload(http, "mine", save({"v": VECTOR})).raise_for_status()
    http.headers["Authorization"] = "Bearer two"
    assert http.get("/v1/vectors").json() == {"data": []}
    assert_error(http.get("/v1/vectors/mine"), 404, "not_found", param="vector")
    assert_error(http.delete("/v1/vectors/mine"), 404, "not_found", param="vector")
    session = open_session(http)
    body = {"layer": 1, "action": "edit", "edits": [{"op": "add", "vector": "mine"}]}
    assert_error(http.post(f"{session}/breakpoints", json=body), 404, "not_found", param="edits.0.vector")

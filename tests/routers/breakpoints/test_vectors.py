"""Named steering vectors: uploaded, used, replaced, refused. Probes, and guards that stop or pause a turn."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from safetensors.torch import load as load_torch
from safetensors.torch import save as save_torch

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import HIDDEN, TURN, arm, generate, open_session, pause, read, resume

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


torch.manual_seed(11)
LINEAR = torch.nn.Linear(HIDDEN, 1)
DEEP = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 9), torch.nn.ReLU(), torch.nn.Linear(9, 1))


def upload_probe(http: httpx.Client, probe: Any, **fields: Any) -> httpx.Response:
    form = {"name": "calm", "layer": 1, **fields}
    return http.post("/v1/probes", data=form, files={"weights": save_torch(probe.state_dict())})


def watch(http: httpx.Client, session: str, *, timeout_s: float = 600, **guard: Any) -> str:
    body = {"action": "probe", "probe": {"name": "calm", **guard}, "when": {"pass": "decode" if guard else "any"}}
    answer = http.post(f"{session}/breakpoints", json={**body, "timeout_s": timeout_s})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


@pytest.fixture(autouse=True)
def nothing_left(http: httpx.Client) -> Iterator[None]:
    yield
    http.delete("/v1/probes/calm")


@pytest.mark.parametrize("probe", [LINEAR, DEEP], ids=["linear", "deep"])
@pytest.mark.parametrize("output", ["sigmoid", "none"])
def test_values_are_those_of_pytorch(http: httpx.Client, session: str, probe: Any, output: str) -> None:
    upload_probe(http, probe, output=output).raise_for_status()
    watch(http, session)
    arm(http, session, action="capture")
    turn = generate(http, session)
    http.delete("/v1/probes/calm").raise_for_status()  # what is armed keeps its own
    kept = sorted(load(http.get(f"{session}/captures").content).items())
    hidden = torch.from_numpy(np.concatenate([each for _, each in kept]))
    with torch.no_grad():
        wanted = probe(hidden)[:, 0]
        wanted = wanted.sigmoid() if output == "sigmoid" else wanted
    assert [p for each in turn["probes"] for p in each["positions"]] == list(range(len(hidden)))
    assert [v for each in turn["probes"] for v in each["values"]] == pytest.approx(wanted.tolist(), abs=1e-5)
    plain = open_session(http)
    assert generate(http, plain)["token_ids"] == turn["token_ids"]
    assert "probes" not in generate(http, plain)


def test_a_guard_stops_or_pauses_before_the_next_token(http: httpx.Client, session: str) -> None:
    upload_probe(http, LINEAR).raise_for_status()
    watch(http, session)
    whole = generate(http, session, ignore_eos=True)
    decoded = [each for each in whole["probes"] if each["positions"][0] >= len(TURN["token_ids"])]
    highest = max(range(len(decoded)), key=lambda number: decoded[number]["values"][0])
    bound = sorted(each["values"][0] for each in decoded)[-2]
    stopped, paused = open_session(http), open_session(http)
    watch(http, stopped, above=bound, then="stop")
    with httpx.stream(
        "POST", f"{http.base_url}{stopped}/generate", json={**TURN, "ignore_eos": True, "stream": True}
    ) as answer:
        events = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert events.count("probe") == highest + 1
    assert http.get(f"{stopped}/history").json()["token_ids"] == TURN["token_ids"] + whole["token_ids"][: highest + 1]
    guard = watch(http, paused, above=bound, then="pause", timeout_s=50)
    turn = generate(http, paused, ignore_eos=True)
    assert (turn["status"], turn["token_ids"]) == ("paused", whole["token_ids"][: highest + 1])
    assert (turn["checkpoint"]["layer"], turn["probes"][-1]["halts"]) == (1, True)
    assert turn["checkpoint"]["first"] == decoded[highest]["positions"][0]
    assert turn["checkpoint"]["breakpoint"] == guard
    assert turn["checkpoint"]["expires_at"] - turn["checkpoint"]["created_at"] == pytest.approx(50, abs=5)
    assert resume(http, paused)["token_ids"] == whole["token_ids"]
    call = {"model": "tiny-llama", "prompt": TURN["token_ids"], "max_tokens": 6, "temperature": 0}
    headers = {"X-Session-ID": "guarded"}
    http.post("/v1/completions", json={**call, "max_tokens": 1}, headers=headers).raise_for_status()
    named = http.get("/v1/sessions", params={"name": "guarded"}).json()["data"][0]["id"]
    watch(http, f"/v1/sessions/{named}", above=-1, then="stop")
    answer_of_call = http.post("/v1/completions", json=call, headers=headers).raise_for_status().json()
    assert answer_of_call["choices"][0]["finish_reason"] == "content_filter"
    assert answer_of_call["djinn"]["probes"][-1]["halts"]
    http.delete(f"/v1/sessions/{named}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"layer": 9}, "layer"),
        ({"point": "blocks.3.hook_resid_post"}, "layer"),
        ({"point": "nowhere"}, "point"),
        ({"output": "tanh"}, "output"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert_error(upload_probe(http, LINEAR, **fields), 422, "field_out_of_range", param=param)
    assert_error(upload_probe(http, torch.nn.Linear(9, 1)), 422, "field_out_of_range", param="weights.weight")
    assert json.loads(http.get("/v1/probes").content) == {"data": []}

"""Probes: read beside tokens as PyTorch reads them, and guards that stop or pause a turn."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import save

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import HIDDEN, TURN, arm, generate, open_session, resume

torch.manual_seed(11)
LINEAR = torch.nn.Linear(HIDDEN, 1)
DEEP = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 9), torch.nn.ReLU(), torch.nn.Linear(9, 1))


def upload(http: httpx.Client, probe: Any, **fields: Any) -> httpx.Response:
    form = {"name": "calm", "layer": 1, **fields}
    return http.post("/v1/probes", data=form, files={"weights": save(probe.state_dict())})


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
    upload(http, probe, output=output).raise_for_status()
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
    upload(http, LINEAR).raise_for_status()
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
    assert_error(upload(http, LINEAR, **fields), 422, "field_out_of_range", param=param)
    assert_error(upload(http, torch.nn.Linear(9, 1)), 422, "field_out_of_range", param="weights.weight")
    assert json.loads(http.get("/v1/probes").content) == {"data": []}

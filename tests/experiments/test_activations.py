"""`/v1/experiments/activations`, against the hidden states of Transformers' model of the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from app.experiments import activations
from tests.errors import assert_error
from tests.openai.reference import Reference
from tests.processes import serve_process
from tests.waiting import wait_until

PATH = "/v1/experiments/activations"
PROMPTS: list[Any] = ["a cat and a cat", [5, 17, 9, 30, 41, 8], "x"]


def states(reference: Reference, prompt: str | list[int]) -> np.ndarray[Any, Any]:
    """After all layers but the last, `[layers - 1, positions, hidden]`: Transformers norms the last one's output."""
    token_ids = reference.encode(prompt) if isinstance(prompt, str) else prompt
    with torch.inference_mode():
        found = reference.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat(found[1:-1]).numpy()


def about(content: bytes) -> dict[str, Any]:
    """What the metadata of a shard says."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found: dict[str, Any] = json.loads(header["__metadata__"]["activations"])
    return found


CHOSEN: dict[str, tuple[Any, Callable[[list[int]], list[int]]]] = {
    "all": ("all", lambda ids: [*range(len(ids))]),
    "last": ("last", lambda ids: [len(ids) - 1]),
    "ids": ({"token_ids": [30, 97, 120]}, lambda ids: [at for at, token in enumerate(ids) if token in (30, 97, 120)]),
    "regex": ({"regex": r"c.t|x|\)"}, lambda ids: {16: [3, 4, 5, 13, 14, 15], 6: [4], 2: [1]}[len(ids)]),
}


@pytest.mark.parametrize("reduce", ["none", "mean", "last"])
@pytest.mark.parametrize("by", CHOSEN)
def test_each_prompt_is_one_record(http: httpx.Client, reference: Reference, by: str, reduce: str) -> None:
    positions, chosen = CHOSEN[by]
    body = {"prompts": PROMPTS, "points": ["hook_resid_post"] * 2, "layers": [2, 0, 2], "positions": positions}
    answer = http.post(PATH, json={**body, "reduce": reduce})
    tensors, told = load(answer.raise_for_status().content), about(answer.content)
    assert told["layers"] == {"resid_post": [0, 2]}
    for index, (prompt, record) in enumerate(zip(PROMPTS, told["records"], strict=True)):
        places = chosen(reference.encode(prompt) if isinstance(prompt, str) else prompt)
        places = places[-1:] if reduce == "last" else places
        assert record["positions"] == places
        expected = states(reference, prompt)[[0, 2]][:, places]
        found = tensors[f"{index}.resid_post"] if reduce == "none" else tensors["resid_post"][index]
        if reduce != "none":
            expected = expected.mean(1)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def begin(http: httpx.Client, lines: list[Any], **fields: Any) -> dict[str, Any]:
    """A job on these lines."""
    content = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    sent = http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "user_data"})
    body = {"input_file_id": sent.raise_for_status().json()["id"], "points": ["resid_post"], "layers": [1, 3], **fields}
    job: dict[str, Any] = http.post(PATH, json=body).raise_for_status().json()
    return job


def over(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    wait_until(lambda: http.get(f"{PATH}/{job['id']}").json()["status"] in ("completed", "failed", "cancelled"))
    found: dict[str, Any] = http.get(f"{PATH}/{job['id']}").json()
    return found


def records(http: httpx.Client, job: dict[str, Any]) -> dict[int, tuple[dict[str, Any], bytes]]:
    """What is told of each prompt in the shards of a job, and its activations."""
    found: dict[int, tuple[dict[str, Any], bytes]] = {}
    for shard in job["shards"]:
        content = http.get(f"/v1/files/{shard['file_id']}/content").raise_for_status().content
        tensors, told = load(content), about(content)["records"]
        assert [each["index"] for each in told] == list(range(shard["first"], shard["end"]))
        assert (len(content), sum("error" in each for each in told)) == (shard["bytes"], shard["failed"])
        assert not found.keys() & {each["index"] for each in told}
        found |= {
            each["index"]: (each, tensors.get(f"{each['index']}.resid_post", np.array(0)).tobytes()) for each in told
        }
    return found


def test_a_killed_server_goes_on_and_the_bits_are_those_of_one_that_was_not(tmp_path: Path) -> None:
    lines: list[Any] = [{"prompt": f"Number {n} " * (n % 7 + 1), "id": f"p{n}"} for n in range(300)]
    lines[5], lines[150] = {"prompt": "long " * 3000}, {"prompt": [1, 100_000]}
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        job = begin(http, lines, prompts_per_shard=16)
        wait_until(lambda: len(http.get(f"{PATH}/{job['id']}").json()["shards"]) >= 3)
        server.kill()
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        found = over(http, job)
        assert (found["status"], found["prompt_counts"]) == ("completed", {"total": 300, "completed": 298, "failed": 2})
        resumed, whole = records(http, found), records(http, over(http, begin(http, lines, prompts_per_shard=300)))
        assert list(resumed) == list(range(300))
        assert resumed == whole
        assert {index for index, (told, _) in resumed.items() if "error" in told} == {5, 150}
        assert resumed[7][0]["id"] == "p7"


def test_a_job_is_cancelled_and_a_file_of_anything_else_refused(http: httpx.Client) -> None:
    job = begin(http, [{"prompt": "long " * 200}] * 200, prompts_per_shard=1)
    wait_until(lambda: http.get(f"{PATH}/{job['id']}").json()["shards"])
    assert http.post(f"{PATH}/{job['id']}/cancel").json()["status"] == "cancelling"
    assert 1 <= over(http, job)["prompt_counts"]["completed"] < 200
    assert_error(http.post(f"{PATH}/{job['id']}/cancel"), 409, "wrong_state")
    failed = over(http, begin(http, [{"prompt": "x"}, b"{", {"prompt": 5}, {"prompt": "x", "layers": [1]}]))
    assert failed["status"] == "failed"
    assert [each["line"] for each in failed["errors"]] == [2, 3, 4]
    assert [each["id"] for each in http.get(PATH).json()["data"]][-1] == job["id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"points": ["resid"]}, "points.0"),
        ({"points": ["blocks.9.hook_resid_post"]}, "points.0"),
        ({"points": ["state"]}, "points.0"),
        ({"layers": [4]}, "layers"),
        ({"positions": {"regex": "("}}, "positions.regex"),
        ({"positions": {"regex": "(" * 500 + ")" * 500}}, "positions.regex"),
        ({"positions": {"regex": "(?:a{10000}){10000}"}}, "positions.regex"),
        ({"positions": {"regex": "a|(?R)"}}, "positions.regex"),
        ({"positions": {"regex": "$"}}, "prompts.0"),
        ({"positions": {"regex": "nowhere"}}, "prompts.0"),
        ({"positions": {"regex": "(?:a|aa)+$"}, "prompts": ["a" * 60 + "b"]}, "positions.regex"),
        ({"points": ["pattern"], "reduce": "mean"}, "reduce"),
        ({"prompts": [[1], [5] * 1025]}, "prompts.1"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"prompts": [[5] * 1000] * 200, "points": ["resid_post", "mlp_post"]}, "prompts"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "MAX_ASKED_BYTES", 16 << 20)
    answer = http.post(PATH, json={"prompts": ["a cat"], **fields})
    status, code = (400, "context_length_exceeded") if param == "prompts.1" else (422, "field_out_of_range")
    assert_error(answer, status, code, param=param)

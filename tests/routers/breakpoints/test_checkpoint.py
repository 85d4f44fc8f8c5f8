"""What a paused turn has left and captures have recorded: read, written, edited, seen through the lens, refused. How it
goes on: resumed, timed out, in a copy on another server, and in a file that a client forged.
"""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load, save
from safetensors.torch import load as load_torch

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    CONTEXT,
    HIDDEN,
    LAYERS,
    TURN,
    arm,
    edit,
    generate,
    open_session,
    pause,
    read,
    resume,
    without_age,
    write,
)
from tests.routers.forging import IMPORT, imported, with_about
from tests.routers.generating import streaming


def test_the_activation_comes_as_safetensors(http: httpx.Client, session: str, tmp_path: Path) -> None:
    checkpoint = pause(http, session)
    answer = http.get(f"{session}/checkpoint/activation")
    assert answer.headers["content-type"] == "application/octet-stream"
    (tmp_path / "activation").write_bytes(answer.content)
    with safe_open(tmp_path / "activation", "numpy") as file:
        assert list(file.keys()) == ["activation"]
        assert file.metadata() == {"layer": "1", "point": "resid_post", "first": "0", "end": "4"}
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
    assert found.json() == {
        "layer": 1,
        "point": "resid_post",
        "first": 1,
        "end": 3,
        "dtype": "float32",
        "values": values,
    }
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
def test_what_does_not_fit_is_refused(http: httpx.Client, session: str, content: bytes, param: str, says: str) -> None:
    pause(http, session)
    before = read(http, session)
    assert says in assert_error(write(http, session, content), 422, "field_out_of_range", param=param)
    assert np.array_equal(read(http, session), before)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"op": "add", "vector": [1]}, "edits.1.vector", "must have 64 numbers, not 1"),
        ({**SCALE, "positions": [2, 5]}, "edits.1.positions", "within 0:4"),
    ],
)
def test_a_bad_edit_changes_nothing(
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
    assert_error(unknown, 404, "not_found", param="edits.0.vector")


def test_edits_are_made_all_or_none(http: httpx.Client, session: str) -> None:
    """The last would be infinite."""
    pause(http, session)
    before = read(http, session)
    answer = edit(http, session, SCALE, *[{"op": "scale", "factor": 1e6}] * 8)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"].startswith("edits")
    assert np.array_equal(read(http, session), before)


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
def test_layers_must_be_there(
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


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"until": {"layer": 1}}, "until.layer", "above 1, where the session is paused, and at most 3"),
        ({"until": "layer"}, "until", "'next_token' or 'end'"),
        ({"edits": [SCALE, {"op": "scale"}]}, "edits.1.factor", "scale needs it"),
        ({"edits": [{**SCALE, "positions": [0, 5]}]}, "edits.0.positions", "within 0:4"),
        ({"edits": [{"op": "add", "vector": [1]}]}, "edits.0.vector", f"must have {HIDDEN}"),
        ({"edits": [SCALE], "until": {"layer": 0}}, "until.layer", "above 1, where the session is paused"),
    ],
)
def test_a_bad_field_changes_nothing(
    http: httpx.Client, session: str, body: dict[str, Any], param: str, says: str
) -> None:
    checkpoint = pause(http, session)
    before = read(http, session).tolist()
    message = assert_error(http.post(f"{session}/resume", json=body), 422, "field_out_of_range", param=param)
    assert param in message
    assert says in message
    assert without_age(http.get(session).json()["checkpoint"]) == without_age(checkpoint)
    assert read(http, session).tolist() == before


def test_a_paused_session_takes_no_other_turn(http: httpx.Client, session: str) -> None:
    pause(http, session)
    for answer in (http.post(f"{session}/generate", json=TURN), http.post(f"{session}/rewind", json={"to_token": 0})):
        assert "is paused" in assert_error(answer, 409, "wrong_state")
    assert http.get(session).json()["state"] == "paused"


def test_the_prefill_of_a_turn_that_pauses_in_it_ends_with_its_pause(http: httpx.Client, session: str) -> None:
    began = time.perf_counter()
    pause(http, session)
    longest = (time.perf_counter() - began) * 1000
    time.sleep(0.05)
    resume(http, session)
    assert 0 < http.get(session).json()["usage"]["resume_ms"]["prefill"] <= longest


def test_a_pause_without_room_is_told_and_the_session_goes_on(serve_with: ServeWith) -> None:
    http = serve_with(max_activation_bytes=100)
    session = open_session(http)
    arm(http, session, when={"pass": "prefill"})
    answer = http.post(f"{session}/generate", json=TURN)
    assert "max_activation_bytes" in assert_error(answer, 429, "activations_full")
    assert answer.headers["retry-after"] == "1"
    found = http.get(session).json()
    assert (found["state"], found["tokens"]) == ("idle", 0)
    http.delete(f"{session}/breakpoints").raise_for_status()
    assert len(generate(http, session)["token_ids"]) == TURN["max_tokens"]


def exported(http: httpx.Client, session: str) -> tuple[bytes, dict[str, Any]]:
    """The file, and the label in it."""
    content = http.get(f"{session}/export").raise_for_status().content
    label: dict[str, Any] = json.loads(load(content)["about"].tobytes())
    return content, label


FORMS: list[dict[str, Any]] = [
    {"regex": "(ab|ba){30}"},
    {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 30, "maxItems": 30}},
]
AGAIN: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 400}


def paused(http: httpx.Client, form: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A session whose turn has paused after some tokens, and that turn."""
    session = open_session(http)
    arm(http, session, when={"position": CONTEXT + 8}, once=True)
    turn = generate(http, session, structured_outputs=form, **AGAIN)
    assert turn["status"] == "paused"
    return session, turn


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_paused_turn_keeps_its_grammar_wherever_it_is(
    http: httpx.Client, serve_with: ServeWith, form: dict[str, Any]
) -> None:
    whole = generate(http, open_session(http), structured_outputs=form, **AGAIN)
    assert whole["finish_reason"] == "stop"
    session, turn = paused(http, form)
    assert whole["text"].startswith(turn["text"])
    fork = f"/v1/sessions/{http.post(f'{session}/fork').raise_for_status().json()['id']}"
    content, label = exported(http, session)
    assert label["turn"]["fields"]["structured_outputs"]
    there = serve_with()
    for server, each in ((http, session), (http, fork), (there, imported(there, content))):
        found = resume(server, each)
        assert (found["text"], found["finish_reason"]) == (whole["text"], "stop")
        assert "resumed" in [entry["kind"] for entry in server.get(f"{each}/timeline").json()["data"]]


def test_a_file_whose_turn_does_not_match_its_grammar_is_refused(http: httpx.Client) -> None:
    session, _ = paused(http, FORMS[0])
    content, label = exported(http, session)
    for form, says in (({"regex": "c+"}, "do not match"), ({"regex": "("}, "unclosed group")):
        label["turn"]["fields"]["structured_outputs"] = form
        message = assert_error(http.post(IMPORT, content=with_about(content, json.dumps(label))), 422, "bad_export")
        assert says in message


def test_a_checkpoint_in_a_wrong_place_does_not_end_the_turn_of_another(serve_with: ServeWith, tmp_path: Path) -> None:
    """It is put where its pass has not been. A context can have been computed in such parts, so it comes in."""
    http = serve_with(state_dir=tmp_path)  # only with a disk tier is the KV of a file taken over
    session = open_session(http)
    generate(http, session, token_ids=[5] * 20, max_tokens=4)
    arm(http, session, when={"pass": "prefill"})
    place = generate(http, session, token_ids=[6] * 20)["checkpoint"]
    assert (place["first"], place["end"]) == (23, 44)
    content, label = exported(http, session)
    label["turn"]["checkpoint"] |= {"first": 13, "end": 34}
    forged, bystander = imported(http, with_about(content, json.dumps(label))), open_session(http)
    with streaming(http, bystander, **{**TURN, "max_tokens": 200}) as events:
        next(events)
        http.delete(f"{forged}/breakpoints").raise_for_status()
        assert resume(http, forged)["status"] == "finished"
        *_, last = events
    assert (last.event, last.json()["finish_reason"], len(last.json()["token_ids"])) == ("finished", "length", 200)

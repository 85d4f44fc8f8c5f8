"""Requests, streams and tensors without a network, held against the server and the libraries that wrote the formats."""

import inspect
import json
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load, save

import client
from app.wire.breakpoints import BreakpointBody
from app.wire.edits import EditBody
from app.wire.turns import GenerateBody
from client import Checkpoint, Session, breakpoint_calls, calls, edits, tensors
from client.calls import Call
from client.captures import parse_captures
from client.edge import Connection, to_request

HTTP = httpx.Client()


def request_of(call: Call[Any]) -> httpx.Request:
    return to_request(HTTP, Connection("http://host/prefix", None, timeout=5), call)


@given(st.text(min_size=1, max_size=20) | st.sampled_from([".", "..", "..."]))
def test_an_id_stays_one_part_of_the_path(name: str) -> None:
    for request, parts in (
        (request_of(calls.rewind_session(name, 3)), [name, "rewind"]),
        (request_of(breakpoint_calls.remove_breakpoint(name, name)), [name, "breakpoints", name]),
    ):
        path = request.url.raw_path.decode()
        assert [unquote(part) for part in path.split("/")] == ["", "prefix", "v1", "sessions", *parts]


def test_only_what_is_given_is_sent() -> None:
    assert request_of(calls.create_session(None, None, None, None)).read() == b"{}"
    params = request_of(calls.list_sessions()).url.params
    assert not {"state", "tier", "name", "after"} & set(params)
    assert request_of(calls.set_phase("ses_1", "ready", None)).read() == b'{"phase":"ready"}'
    body = request_of(calls.generate("ses_1", {"prompt": "x"}, stream=True)).read()
    assert body == b'{"prompt":"x","stream":true}'
    assert edits.pause_body({"layer": 6}) == {"action": "pause", "when": {}, "layer": 6}
    captured = edits.capture_body({"layers": range(1, 3), "once": True})
    sent = request_of(breakpoint_calls.arm("ses_1", captured)).read()
    assert json.loads(sent) == {"action": "capture", "when": {}, "layers": [1, 2], "once": True}
    with pytest.raises(client.InvalidRequest, match="float"):
        request_of(breakpoint_calls.edit_checkpoint("ses_1", [{"add": [1.0, float("nan")]}]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "not none"),
        ({"scale": 0.9, "ablate": True}, "not scale and ablate"),
        ({"scale": 0.9, "factor": 2.0}, "factor"),
        ({"add": [[1.0], [1.0, 2.0]]}, "vector"),
    ],
)
def test_what_is_no_edit_is_not_sent(options: Any, message: str) -> None:
    with pytest.raises(client.InvalidRequest, match=message):
        edits.edit_body(options)
    with pytest.raises(client.InvalidRequest, match=message):
        breakpoint_calls.resume("ses_1", None, [options], stream=False)


def keywords(call: Any) -> set[str]:
    """What a call takes for the server."""
    return set(inspect.signature(call).parameters) - {"self", "timeout"}


def test_every_field_of_a_breakpoint_can_be_given() -> None:
    """And the server knows every one of them, as a turn's."""
    assert keywords(Session.generate) == keywords(Session.stream) == set(GenerateBody.model_fields) - {"stream"}
    assert set(calls.TurnOptions.__annotations__) == keywords(Session.generate)
    assert keywords(Session.steer) == keywords(Session.capture_at) | keywords(Checkpoint.edit)
    assert keywords(Checkpoint.edit) == set(edits.EditOptions.__annotations__)
    every = {
        "layer": 6,
        "point": "z",
        "when_pass": "decode",
        "position": 70,
        "token_id": 5,
        "every": 10,
        "once": True,
        "timeout_s": 5.0,
        "on_timeout": "abort",
    }
    steer = {"layers": [3], "position": 1, "add": "kind", "factor": 2.0, "positions": "all"}
    assert keywords(Session.break_at) == {*every, "layers", "where"}
    paused = BreakpointBody.model_validate_json(json.dumps(edits.pause_body(every)))
    steered = BreakpointBody.model_validate_json(json.dumps(edits.steer_body(steer)))
    captured = BreakpointBody.model_validate_json(json.dumps(edits.capture_body({"layer": 1, "heads": (0, 3)})))
    probing = BreakpointBody.model_validate_json(json.dumps(edits.probe_body({"name": "p"})))
    telling = BreakpointBody.model_validate_json(json.dumps(edits.features_body({"dictionary": "d", "top_k": 3})))
    given = set[str]().union(*(each.model_fields_set for each in (paused, steered, captured, probing, telling)))
    assert given == set(BreakpointBody.model_fields)
    where = {"along": np.ones(2), "above": 3.0}
    others: list[dict[str, Any]] = [
        {"replace": True, "source": {"session": "ses_1"}, "heads": (1,), "keep_norm": True, "where": where},
        {"ablate": "mean", "neurons": [2], "max_norm": 1.0},
        {"project_out": "kind", "orthogonal_to": [1.0], "experts": [0]},
        {"clamp": True, "factor": 2.0, "feature": {"dictionary": "mine", "index": 7}},
    ]
    bodies = [EditBody.model_validate_json(json.dumps(edits.edit_body(each))) for each in others]
    assert {"factor", "positions"}.union(*(each.model_fields_set for each in bodies)) == set(EditBody.model_fields)
    assert paused.when.model_fields_set == {"in_pass", "position", "token_id", "every"}
    assert steered.edits is not None
    assert steered.edits[0].model_fields_set == {"op", "vector", "factor", "positions"}
    assert steered.when.position == 1


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
values = arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 5)), elements=st.floats(width=32))


@pytest.mark.parametrize("dtype", DTYPES)
@given(array=values)
def test_tensors_are_written_and_read_as_pytorch_does(dtype: str, array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    written, tensor = load(tensors.dump("h", array, dtype))["h"], torch.from_numpy(array).to(DTYPES[dtype])
    assert written.dtype == DTYPES[dtype]
    assert torch.equal(written.isnan(), tensor.isnan())
    assert torch.equal(written.nan_to_num(0.0), tensor.nan_to_num(0.0))
    found, metadata = tensors.load(save({"h": tensor}, metadata={"layer": "3"}))
    assert metadata == {"layer": "3"}
    assert found["h"].dtype == (np.float16 if dtype == "float16" else np.float32)
    np.testing.assert_array_equal(found["h"], tensor.float().numpy())


@pytest.mark.parametrize("order", [np.s_[:], np.s_[::-1], np.s_[::2]])
def test_any_layout_in_memory_is_written_row_by_row(order: slice) -> None:
    array = np.arange(12, dtype=">f8").reshape(3, 4).T[order]
    np.testing.assert_array_equal(load(tensors.dump("h", array, "float32"))["h"].numpy(), array)


@pytest.mark.parametrize("wrong", [["a"], [[1.0], [1.0, 2.0]], 1 + 2j, None, {}])
def test_what_is_not_numbers_is_not_sent(wrong: Any) -> None:
    with pytest.raises(client.InvalidRequest):
        tensors.dump("h", wrong, "float32")


@given(body=st.binary() | st.just(save({"h": torch.ones(2, dtype=torch.int64)})))
def test_any_other_bytes_or_types_are_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        tensors.load(body)


def test_captures_without_their_metadata_are_an_error() -> None:
    for metadata in ({}, {"dropped": "0"}, {"dropped": "0", "h": "{}"}, {"dropped": "0", "h": "["}):
        with pytest.raises(ValueError, match=r"\w"):
            parse_captures(save({"h": torch.ones(1, 2)}, metadata=metadata))

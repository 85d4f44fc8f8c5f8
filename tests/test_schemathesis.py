"""Generated requests, good and bad, against the documented schema: no 500, no undocumented answer or event.

Schemathesis's own pytest integration does not work with pytest 9.2, so the operations are walked here.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from safetensors.numpy import save

pytest.importorskip("schemathesis", reason="make setup-dev installs it")

import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.described_events import check_stream
from tests.openai.reference import save_tiny_model
from tests.routers.breakpoints.pausing import HIDDEN
from tests.serving import serve

pytestmark = pytest.mark.dev

Operation = APIOperation[Any, Any, Any, Any]

WIRES = ("openai", "anthropic")
"""Tags of the routes that do nothing without the right model name."""
WITHOUT_FIELDS = (
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/models",
    "GET /v1/models/{model}",
    *(f"{each} /v1/files/{{file_id}}" for each in ("GET", "DELETE")),
    "GET /v1/files/{file_id}/content",
    "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
    *(f"{each} /v1/conversations/{{conversation_id}}" for each in ("GET", "DELETE")),
    *(f"{each} /v1/conversations/{{conversation_id}}/items/{{item_id}}" for each in ("GET", "DELETE")),
)
"""Requests to them have no field that could be invalid. An id may be unknown."""
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
WITH_FIELDS = (
    *(
        f"POST {path}"
        for path in (*STREAMING, "/tokenize", "/detokenize", "/v1/embeddings", "/v1/messages/count_tokens")
    ),
    "GET /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    *(f"{each} /v1/{what}" for each in ("GET", "POST") for what in ("files", "batches")),
    *(f"POST /v1/responses/{what}" for what in ("compact", "input_tokens")),
    *(f"POST /v1/{what}" for what in ("conversations", "conversations/{conversation_id}")),
    *(f"{each} /v1/conversations/{{conversation_id}}/items" for each in ("GET", "POST")),
)
TOKENS = 4
"""A generated request may ask for thousands."""


def settings_of(share: int) -> settings:
    """A share of the profile's examples: to make one takes long, bad ones longest, and each is a request."""
    examples = max(2, settings().max_examples // share)
    return settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def operations_of(schema: Any) -> dict[str, Operation]:
    return {result.ok().label: result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)}


@pytest.fixture(scope="module")
def small_url() -> Iterator[str]:
    """A server whose turns are short, because generated requests seldom say `max_tokens`."""
    with serve(max_model_len=64, max_sessions=100_000) as url:
        yield url


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.long)]
)
def test_every_answer_is_documented(small_url: str, subtests: pytest.Subtests, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{small_url}/openapi.json").exclude(tag=list(WIRES))
    operations = operations_of(schema.exclude(path="/v1/events"))  # it has no end
    assert len(operations) > 30
    for label, operation in operations.items():
        # Nothing can be wrong about a request without fields.
        with subtests.test(label), suppress(Unsatisfiable):
            check_operation(operation, mode, small_url)


def check_operation(operation: Operation, mode: GenerationMode, url: str) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings_of(7 if mode is GenerationMode.POSITIVE else 15)
    def check(case: Case[Any]) -> None:
        name_what_there_is(case.path_parameters, operation.path, url)
        # Some rules, such as "exactly one of", are not in the schema: a 422 is a fair answer to what it allows.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


def name_what_there_is(parameters: dict[str, Any], path: str, url: str) -> None:
    """Generated names would only ever find the 404."""
    if "session_id" in parameters:
        parameters["session_id"] = httpx.post(f"{url}/v1/sessions").json()["id"]
        session = f"{url}/v1/sessions/{parameters['session_id']}"
        if "/checkpoint" in path or path.endswith("/resume") or "breakpoint_id" in parameters:
            armed = httpx.post(f"{session}/breakpoints", json={"layer": 0, "action": "pause"}).json()
            turn = httpx.post(f"{session}/generate", json={"token_ids": [5, 6], "max_tokens": 4}).json()
            assert turn["status"] == "paused"
            if "breakpoint_id" in parameters:
                parameters["breakpoint_id"] = armed["id"]
    if path.startswith("/v1/vectors/"):
        parameters["name"] = "named"
        content = save({"v": np.ones(HIDDEN, np.float32)})
        httpx.post(f"{url}/v1/vectors", params={"name": "named"}, content=content).raise_for_status()


class Campaign:
    """Requests to the routes of the OpenAI and Anthropic APIs of one server."""

    def __init__(self, url: str) -> None:
        self.operations = operations_of(schemathesis.openapi.from_url(f"{url}/openapi.json").include(tag=list(WIRES)))
        self._http = httpx.Client(base_url=url, timeout=30)
        self._document = self._http.get("/openapi.json").json()
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, label: str, mode: GenerationMode, *, share: int, streams: bool = False) -> Counter[tuple[int, str]]:
        """Send requests to one operation; counts the answers by status and media type.

        Raises the failures of schemathesis, and `ValidationError` for an event that is not as documented.
        """
        operation, answered = self.operations[label], Counter[tuple[int, str]]()

        @settings_of(share)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Case[Any]) -> None:
            self._name_what_there_is(case)
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                self._bound(case.body, operation.path, streams)
            response = case.call(timeout=30)
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
            media_type = response.headers.get("content-type", [""])[0].partition(";")[0]
            if media_type == "text/event-stream":
                assert check_stream(self._document, operation.path, response.content)
            answered[response.status_code, media_type] += 1

        check()
        return answered

    def _name_what_there_is(self, case: Case[Any]) -> None:
        if "model" in case.path_parameters:
            case.path_parameters["model"] = self._model
        if "response_id" in case.path_parameters:
            asked = {"model": self._model, "input": "x", "max_output_tokens": 1}
            case.path_parameters["response_id"] = self._http.post("/v1/responses", json=asked).json()["id"]
        if "conversation_id" in case.path_parameters:
            items = [{"type": "message", "role": "user", "content": "x"}]
            opened = self._http.post("/v1/conversations", json={"items": items}).json()["id"]
            case.path_parameters["conversation_id"] = opened
            if "item_id" in case.path_parameters:
                listed = self._http.get(f"/v1/conversations/{opened}/items").json()["data"]
                case.path_parameters["item_id"] = listed[0]["id"]
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("x", b"x")}}
        if "file_id" in case.path_parameters:
            case.path_parameters["file_id"] = self._http.post("/v1/files", **form).json()["id"]
        if "batch_id" in case.path_parameters or case.operation.path == "/v1/batches":
            asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
            asked["input_file_id"] = self._http.post("/v1/files", **form).json()["id"]
            case.path_parameters["batch_id"] = self._http.post("/v1/batches", json=asked).json()["id"]
            if isinstance(case.body, dict) and isinstance(case.body.get("input_file_id"), str):
                case.body["input_file_id"] = asked["input_file_id"]
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = self._model

    def _bound(self, body: dict[str, Any], path: str, streams: bool) -> None:
        """Short answers, streamed or whole."""
        if path == "/tokenize" and body.get("messages") is None:
            body.setdefault("prompt", "x")
        if path.startswith("/v1/responses"):
            body |= {
                "max_output_tokens": TOKENS,
                "max_tokens": None,
                "previous_response_id": None,
                "conversation": None,
            }
        if path in ("/v1/responses/compact", "/v1/responses/input_tokens"):
            whole = {"format": {"type": "json_schema", "name": "summary", "schema": {"const": 1}}}
            body |= {"input": body.get("input") or "x", "text": whole}
        if path not in STREAMING:
            return
        body |= {"min_tokens": 0, "stream": streams}
        if not streams:
            body.pop("stream_options", None)
        if path != "/v1/responses":
            body["max_tokens"] = TOKENS
            body.pop("max_completion_tokens", None)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    with serve(model=str(folder), max_sessions=100_000) as url:
        campaign = Campaign(url)
        yield campaign
        campaign.close()


@pytest.mark.parametrize("operation", WITH_FIELDS + WITHOUT_FIELDS)
def test_good_requests_to_the_wires(campaign: Campaign, operation: str) -> None:
    assert campaign.operations.keys() == {*WITH_FIELDS, *WITHOUT_FIELDS}
    is_streamed = operation.partition(" ")[2] in STREAMING
    answered = campaign.run(operation, GenerationMode.POSITIVE, share=4)
    if is_streamed:
        answered += campaign.run(operation, GenerationMode.POSITIVE, share=4, streams=True)
    if operation == "POST /v1/responses/{response_id}/cancel":  # it is over
        assert answered.keys() == {(400, "application/json")}
    elif operation == "POST /v1/batches/{batch_id}/cancel":
        assert answered.keys() <= {(200, "application/json"), (409, "application/json")}
    else:
        assert (200, "application/octet-stream" if operation.endswith("/content") else "application/json") in answered
    if operation != "GET /v1/responses/{response_id}":  # which its query decides
        assert ((200, "text/event-stream") in answered) is is_streamed


@pytest.mark.long
@pytest.mark.parametrize("operation", WITH_FIELDS)
def test_bad_requests_to_the_wires(campaign: Campaign, operation: str) -> None:
    answered = campaign.run(operation, GenerationMode.NEGATIVE, share=25)
    assert any(status == 400 for status, _ in answered)

"""Generated requests to the routes of the OpenAI and Anthropic APIs, good and bad, and checks of their answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.described_events import check_stream

TAGS = ("openai", "anthropic")
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
TOKENS = 4
"""A generated request may ask for thousands."""

Operation = APIOperation[Any, Any, Any, Any]


class Campaign:
    """Requests to one server."""

    def __init__(self, url: str) -> None:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json").include(tag=list(TAGS))
        self.operations = {
            result.ok().label: result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)
        }
        self._http = httpx.Client(base_url=url, timeout=30)
        self._document = self._http.get("/openapi.json").json()
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, label: str, mode: GenerationMode, *, examples: int) -> Counter[tuple[int, str]]:
        """Send requests to one operation; counts the answers by status and media type.

        Raises the failures of schemathesis, and `ValidationError` for an event that is not as documented.
        """
        operation, answered = self.operations[label], Counter[tuple[int, str]]()

        @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode), streams=st.booleans())
        def check(case: Case[Any], streams: bool) -> None:
            self._name_what_there_is(case)
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                self._bound(case.body, operation.path, streams)
            response = case.call(timeout=30)
            # Some rules are not in the schema: a 400 is a fair answer to some of what it allows.
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
            media_type = response.headers.get("content-type", [""])[0].partition(";")[0]
            if media_type == "text/event-stream":
                assert check_stream(self._document, operation.path, response.content)
            answered[response.status_code, media_type] += 1

        check()
        return answered

    def _name_what_there_is(self, case: Case[Any]) -> None:
        """Generated names would only ever find the 404."""
        if "model" in case.path_parameters:
            case.path_parameters["model"] = self._model
        if "response_id" in case.path_parameters:
            asked = {"model": self._model, "input": "x", "max_output_tokens": 1}
            case.path_parameters["response_id"] = self._http.post("/v1/responses", json=asked).json()["id"]
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = self._model

    def _bound(self, body: dict[str, Any], path: str, streams: bool) -> None:
        """Short answers, and as many streamed ones as whole ones."""
        if path == "/tokenize" and body.get("messages") is None:
            body.setdefault("prompt", "x")
        if path not in STREAMING:
            return
        body |= {"min_tokens": 0, "stream": streams}
        if not streams:
            body.pop("stream_options", None)
        if path == "/v1/responses":
            body |= {"max_output_tokens": TOKENS, "max_tokens": None, "previous_response_id": None}
        else:
            body["max_tokens"] = TOKENS
            body.pop("max_completion_tokens", None)

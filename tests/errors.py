"""The one shape that every error answer has."""

from typing import Any

import httpx
from starlette.responses import JSONResponse, Response


def assert_messages_error(response: httpx.Response, status: int, kind: str | None = None) -> str:
    """Check the error body and status of a route of Anthropic's API, and with a kind also that, and that the headers
    name the request too; returns the message.
    """
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    if kind is not None:
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def assert_error(response: httpx.Response, status: int, code: str, *, param: str | None = None) -> str:
    """Check the error body, status, code and field; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body: dict[str, Any] = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "code", "param"}
    assert body["error"]["code"] == code
    assert body["error"]["param"] == param
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    return message


def error_response(status: int, code: str, headers: dict[str, str] | None = None) -> Response:
    """What a server answers that stands in for Djinn."""
    return JSONResponse({"error": {"message": code, "code": code}}, status, headers)

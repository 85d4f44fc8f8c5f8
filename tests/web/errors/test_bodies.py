"""Each API has its own form of an error."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.domain.errors import DjinnError, Draining, EngineError, FieldOutOfRange, WrongState
from app.web.errors.bodies import error_answer

SCOPE: Any = {"path": "/v1/messages", "state": {"request_id": "req_1"}}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Draining("x"), 529, "overloaded_error"),
        (EngineError("x"), 500, "api_error"),
        (WrongState("x"), 409, "invalid_request_error"),
        (FieldOutOfRange("x", param="y"), 422, "invalid_request_error"),
    ],
)
def test_the_messages_routes_have_anthropics(error: DjinnError, status: int, kind: str) -> None:
    found, body = error_answer(error, SCOPE)
    assert found == status
    assert orjson.loads(body) == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req_1"}


def test_all_others_have_openais() -> None:
    status, body = error_answer(Draining("x"), {"path": "/v1/chat/completions"})
    assert status == 503
    assert orjson.loads(body) == {"error": {"message": "x", "type": "server_error", "code": "draining", "param": None}}

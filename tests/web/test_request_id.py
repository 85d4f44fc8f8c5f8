from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize("path", ["/health", "/no-such-path", "/v1/sessions/none"])
def test_every_answer_has_an_id_of_its_own(http: httpx.Client, path: str) -> None:
    ids = {http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_the_clients_own_id_comes_back(http: httpx.Client) -> None:
    response = http.get("/health", headers={"X-Request-Id": "trace-7f.3:a_B"})
    assert response.headers["x-request-id"] == "trace-7f.3:a_B"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\x7f", '"><script>', "\xe9"])
def test_an_id_that_could_do_harm_is_replaced(http: httpx.Client, given: str) -> None:
    response = http.get("/health", headers={b"X-Request-Id": given.encode("latin-1")})
    assert response.status_code == 200
    assert response.headers["x-request-id"] != given

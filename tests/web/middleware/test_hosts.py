"""A server without keys answers to its own names only: neither to a rebound name nor to pages of other sites."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from app.domain.errors import FieldOutOfRange
from app.settings import Settings
from tests.anthropic.test_errors import check_body
from tests.conftest import ServeWith
from tests.errors import assert_error

OWN = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000"]
FOREIGN = [
    "",
    "rebound.example",
    "localhost.rebound.example",
    "127.0.0.2",
    "localhost@rebound.example",
    "[::1",
    "a:b:c",
]


@pytest.mark.parametrize("host", OWN)
def test_own_names_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/sessions", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_refused(http: httpx.Client, host: str) -> None:
    message = assert_error(http.get("/v1/sessions", headers={"Host": host}), 403, "foreign_host", param="Host")
    assert "--allowed-hosts" in message


@pytest.mark.parametrize("origin", ["https://site.example", "null", "http://localhost.site.example:8000", "http://["])
def test_a_page_of_another_site_is_refused(http: httpx.Client, origin: str) -> None:
    refused = http.post("/v1/sessions", headers={"Origin": origin}, json={})
    assert_error(refused, 403, "foreign_host", param="Origin")


def test_a_page_of_this_machine_is_answered(http: httpx.Client) -> None:
    opened = http.post("/v1/sessions", headers={"Origin": "http://localhost:3000"}, json={})
    assert opened.status_code == 201
    assert "access-control-allow-origin" not in opened.headers
    http.delete(f"/v1/sessions/{opened.json()['id']}")


def test_a_socket_of_another_site_is_refused(http: httpx.Client) -> None:
    url = str(http.base_url.copy_with(scheme="ws", path="/v1/responses"))
    with pytest.raises(InvalidStatus) as refused, connect(url, origin="https://site.example"):  # type: ignore[arg-type]
        pass
    assert refused.value.response.status_code == 403


def test_the_refusal_has_the_body_of_the_api(http: httpx.Client) -> None:
    check_body(http.post("/v1/messages", headers={"Host": "rebound.example"}, json={}), 403, "permission_error")


def test_a_program_may_leave_its_host_out(http: httpx.Client) -> None:
    """As old health checks do, in HTTP/1.0."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_names_can_be_allowed(serve_with: ServeWith) -> None:
    http = serve_with(allowed_hosts=("djinn.lan", "[::1]"))
    for host, status in (("djinn.lan:8000", 200), ("[::1]", 200), ("localhost", 403)):
        assert http.get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("changed", [{"allowed_hosts": ("*",)}, {"api_keys": ("sesame",)}])
def test_any_name_is_answered_where_all_may_call_or_keys_decide(serve_with: ServeWith, changed: dict[str, Any]) -> None:
    headers = {"Host": "any.example", "Origin": "https://site.example", "X-Api-Key": "sesame"}
    assert serve_with(**changed).get("/v1/sessions", headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["a b", " a", "http://a", "a:8000", "[::1]:80", "*.lan", "", "a/b"])
def test_what_could_never_match_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed_hosts"):
        Settings(allowed_hosts=("localhost", name))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "djinn.example"])
def test_a_public_address_needs_keys(host: str) -> None:
    with pytest.raises(FieldOutOfRange, match="public"):
        Settings(host=host).require_safe_access()
    for decided in (Settings(host=host, insecure=True), Settings(host=host, api_keys=("sesame",))):
        decided.require_safe_access()
        assert decided.answered_hosts == ("*",)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_needs_none(host: str) -> None:
    assert host in Settings(host=host).answered_hosts

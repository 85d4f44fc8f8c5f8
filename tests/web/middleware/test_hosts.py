"""A server without keys answers to its own names only: neither to a rebound name nor to pages of others, unless it was
told of them.
"""

import socket
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.settings import Settings
from tests.conftest import ServeWith
from tests.errors import assert_error

OWN = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"]
FOREIGN = ["", "localhost.rebound.example", "127.0.0.2", "localhost@rebound.example", "[::1", "a:b:c"]
PAGE, OTHER = "https://lab.example.org", "https://evil.example.org"
ALLOWED = "access-control-allow-origin"


def preflight(http: httpx.Client, origin: str) -> httpx.Response:
    """What a browser asks before a POST of JSON with a key."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    return http.options("/v1/chat/completions", headers=headers)


@pytest.mark.parametrize("host", OWN + FOREIGN)
def test_own_names_are_answered_and_others_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/sessions", headers={"Host": host})
    if host in OWN:
        assert answer.status_code == 200
    else:
        assert "--allowed-hosts" in assert_error(answer, 403, "foreign_host", param="Host")


@pytest.mark.parametrize(
    "origin",
    [PAGE, "null", "http://localhost.site.example:8000", "http://[", "http://localhost:x", "http://localhost:3000"],
)
def test_a_page_of_another_site_is_refused(http: httpx.Client, origin: str) -> None:
    refused = http.post("/v1/sessions", headers={"Origin": origin}, json={})
    assert_error(refused, 403, "foreign_host", param="Origin")
    assert ALLOWED not in refused.headers
    assert ALLOWED not in preflight(http, origin).headers


def test_a_page_of_the_server_is_answered_and_of_another_port_or_scheme_refused(http: httpx.Client) -> None:
    """Any user of a machine can listen on another port of it."""
    for host, origin, status in (
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 201),
        ("LOCALHOST", "http://localhost", 201),
        ("localhost:80", "http://localhost", 201),
        ("[::1]:8000", "http://[::1]:8000", 201),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", 403),
        ("127.0.0.1:8000", "http://localhost:8000", 403),
        ("localhost:443", "https://localhost", 403),
        ("localhost", "http://localhost:8000", 403),
    ):
        found = http.post("/v1/sessions", headers={"Host": host, "Origin": origin}, json={})
        assert found.status_code == status, (host, origin)
    headers = {"Host": "localhost", "Origin": "https://localhost", "X-Forwarded-Proto": "https"}
    assert http.post("/v1/sessions", headers=headers, json={}).status_code == 201, "a proxy of this machine has TLS"


def test_a_socket_is_for_pages_of_the_server(http: httpx.Client) -> None:
    url = str(http.base_url.copy_with(scheme="ws", path="/v1/responses"))
    origin: Any = str(http.base_url).rstrip("/")
    with connect(url, origin=origin):
        pass
    for other in ("https://site.example", "http://127.0.0.1:1"):
        with pytest.raises(InvalidStatus) as refused, connect(url, origin=other):  # type: ignore[arg-type]
            pass
        assert refused.value.response.status_code == 403


PRIVATE = ["192.0.2.1:8000", "[2001:db8::1]", "djinn", "djinn:8000", "djinn.lab.svc.cluster.local", "a.internal"]
PUBLIC = ["rebound.example", "rebound.example:80", "192.0.2.1.rebound.example", "a.", "a.notlocal", "internal.example"]


def test_all_may_call_but_no_site_may_rebind_its_name(serve_with: ServeWith) -> None:
    """`--insecure`: other programs check who calls, but a browser goes past them with a name that points here."""
    http = serve_with(host="0.0.0.0", insecure=True)
    for host in PRIVATE:
        assert http.get("/v1/sessions", headers={"Host": host}).status_code == 200, host
        assert http.get("/v1/sessions", headers={"Host": host, "Origin": f"http://{host}".lower()}).status_code == 200
    for host in PUBLIC:
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert_error(http.get("/v1/sessions", headers=headers), 403, "foreign_host", param="Host")
    for origin in ("http://rebound.example", "null", "http://192.0.2.1:3000", "https://192.0.2.1"):
        refused = http.post("/v1/sessions", headers={"Host": "192.0.2.1", "Origin": origin}, json={})
        assert_error(refused, 403, "foreign_host", param="Origin")


def test_a_list_counts_though_all_may_call(serve_with: ServeWith) -> None:
    http = serve_with(host="0.0.0.0", insecure=True, allowed_hosts=("djinn.example",), cors_origins=(PAGE,))
    for host, origin, status in (
        ("djinn.example", None, 200),
        ("djinn.example", "http://djinn.example", 200),
        ("djinn.example", PAGE, 200),
        ("djinn.example", "https://djinn.example", 403),
        ("djinn", None, 403),
        ("192.0.2.1", None, 403),
    ):
        headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
        assert http.get("/v1/sessions", headers=headers).status_code == status, headers


def test_a_program_may_leave_its_host_out(http: httpx.Client) -> None:
    """As old health checks do, in HTTP/1.0."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_names_can_be_allowed_and_any_is_where_all_may_call_or_keys_decide(serve_with: ServeWith) -> None:
    http = serve_with(allowed_hosts=("djinn.lan", "[::1]"))
    for host, status in (("djinn.lan:8000", 200), ("[::1]", 200), ("localhost", 403)):
        assert http.get("/health", headers={"Host": host}).status_code == status
    headers = {"Host": "any.example", "Origin": "https://site.example", "X-Api-Key": "sesame"}
    assert serve_with(api_keys=("sesame",)).get("/v1/sessions", headers=headers).status_code == 200
    http = serve_with(allowed_hosts=("*",))
    assert_error(http.get("/v1/sessions", headers=headers), 403, "foreign_host", param="Origin")
    headers["Origin"] = "http://any.example"
    assert http.get("/v1/sessions", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "djinn.example"])
def test_a_public_address_needs_keys_and_a_loopback_address_none(host: str) -> None:
    with pytest.raises(FieldOutOfRange, match="public") as refused:
        Settings(host=host).require_safe_access()
    assert refused.value.param == "host"
    for decided in (Settings(host=host, insecure=True), Settings(host=host, api_keys=("sesame",))):
        decided.require_safe_access()
        assert ("*" in decided.answered_hosts) is decided.needs_key
    for own in ("127.8.8.8", "::1", "localhost"):
        Settings(host=own).require_safe_access()
        assert own in Settings(host=own).answered_hosts


def test_only_pages_of_a_named_origin_may_read_answers(serve_with: ServeWith) -> None:
    http = serve_with(cors_origins=(PAGE, "http://localhost:5173"))
    asked = preflight(http, PAGE)
    assert asked.status_code == 200
    assert asked.headers[ALLOWED] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = http.get("/v1/models", headers={"Origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, PAGE)
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    for origin in (OTHER, f"{PAGE}:8443", PAGE.replace("https", "http"), f"{PAGE}.evil.org", "null"):
        assert preflight(http, origin).status_code == 400
        refused = http.get("/v1/models", headers={"Origin": origin})
        assert_error(refused, 403, "foreign_host", param="Origin")
        assert ALLOWED not in refused.headers


def test_a_preflight_needs_no_key_and_with_keys_any_origin_may_be_allowed(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("sesame",), cors_origins=(PAGE,))
    assert preflight(http, PAGE).status_code == 200
    refused = http.get("/v1/models", headers={"Origin": PAGE})
    assert_error(refused, 401, "invalid_api_key")
    assert refused.headers[ALLOWED] == PAGE  # the page can read why
    allowed = http.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer sesame"})
    assert allowed.status_code == 200
    http = serve_with(api_keys=("sesame",), cors_origins=("*",))
    answer = http.get("/v1/models", headers={"Origin": OTHER, "Authorization": "Bearer sesame"})
    assert answer.headers[ALLOWED] == "*"
    with pytest.raises(FieldOutOfRange, match="every page"):
        Settings(cors_origins=("*",)).require_safe_access()


def test_what_no_browser_would_send_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("lab.example.org", "https://a/", "https://A", "https://a:443", "null", "https://*.a"):
        assert main(["serve", "--cors-origin", PAGE, "--cors-origin", wrong]) == 2
        assert "--cors-origins: " in capsys.readouterr().err
    for name in ("a b", "http://a", "[::1]:80", "*.lan", ""):
        with pytest.raises(ValidationError, match="allowed_hosts"):
            Settings(allowed_hosts=("localhost", name))
    assert Settings(cors_origins=(PAGE, "http://localhost:5173", "http://[::1]:3000")).cors_origins

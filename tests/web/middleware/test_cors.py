"""Pages of other sites, as browsers ask for them: none may read an answer unless its origin is named."""

from __future__ import annotations

import httpx
import pytest

from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.settings import Settings
from tests.conftest import ServeWith
from tests.errors import assert_error

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


def test_no_other_site_is_allowed_by_default(http: httpx.Client) -> None:
    assert ALLOWED not in preflight(http, PAGE).headers
    refused = http.get("/v1/models", headers={"Origin": PAGE})
    assert_error(refused, 403, "foreign_host", param="Origin")
    assert ALLOWED not in refused.headers


def test_a_page_of_a_named_origin_may_read_answers(serve_with: ServeWith) -> None:
    http = serve_with(cors_origins=(PAGE, "http://localhost:5173"))
    asked = preflight(http, PAGE)
    assert asked.status_code == 200
    assert asked.headers[ALLOWED] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = http.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert answer.headers[ALLOWED] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_pages_of_all_other_origins_stay_out(serve_with: ServeWith) -> None:
    http = serve_with(cors_origins=(PAGE,))
    for origin in (OTHER, f"{PAGE}:8443", PAGE.replace("https", "http"), f"{PAGE}.evil.org", "null"):
        assert preflight(http, origin).status_code == 400
        refused = http.get("/v1/models", headers={"Origin": origin})
        assert_error(refused, 403, "foreign_host", param="Origin")
        assert ALLOWED not in refused.headers


def test_a_preflight_needs_no_key_and_what_follows_does(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("sesame",), cors_origins=(PAGE,))
    assert preflight(http, PAGE).status_code == 200
    refused = http.get("/v1/models", headers={"Origin": PAGE})
    assert_error(refused, 401, "invalid_api_key")
    assert refused.headers[ALLOWED] == PAGE  # the page can read why
    allowed = http.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer sesame"})
    assert allowed.status_code == 200


def test_any_origin_may_be_allowed_where_callers_need_keys(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("sesame",), cors_origins=("*",))
    answer = http.get("/v1/models", headers={"Origin": OTHER, "Authorization": "Bearer sesame"})
    assert answer.headers[ALLOWED] == "*"
    with pytest.raises(FieldOutOfRange, match="every page"):
        Settings(cors_origins=("*",)).require_safe_access()


@pytest.mark.parametrize(
    "wrong",
    ["lab.example.org", "https://lab.example.org/", "https://Lab.example.org", "https://a:443", "null", "https://*.a"],
)
def test_what_no_browser_would_send_is_refused_at_the_start(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--cors-origin", PAGE, "--cors-origin", wrong]) == 2
    assert "--cors-origins: " in capsys.readouterr().err
    assert Settings(cors_origins=(PAGE, "http://localhost:5173", "http://[::1]:3000")).cors_origins

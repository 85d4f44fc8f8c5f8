"""Keys and their file: what it may say, when a key counts, and the audit log, which has nothing of what was said."""

import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from app.domain.errors import FieldOutOfRange
from app.domain.values import Limits
from app.tenants.tenancy import read_tenants
from app.tenants.tenant import Role
from tests.errors import assert_error
from tests.processes import serve_process
from tests.serving import serve
from tests.tenants.conftest import ServeTenants
from tests.tenants.tenant_files import Clock, key, tenant, write_tenants
from tests.waiting import wait_until

SHA = "0123456789abcdef" * 4


def test_a_file_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"""
tenants:
  - name: acme
    role: operator
    keys:
      - sha256: {SHA}
        not_before: 2027-01-01
        not_after: 2027-01-31
    limits:
      requests_per_minute: 60
""")
    (found,) = read_tenants(file)
    assert (found.name, found.role, found.limits) == ("acme", Role.OPERATOR, Limits(requests_per_minute=60))
    assert found.keys[0].not_before == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert found.keys[0].not_after == datetime(2027, 2, 1, tzinfo=UTC).timestamp()  # the day is part of it


def test_a_key_may_end_at_a_time_of_the_day(tmp_path: Path) -> None:
    evening = datetime(2027, 1, 31, 18, tzinfo=UTC).timestamp()
    moments = dict.fromkeys(("2027-01-31T19:00:00+01:00", "2027-01-31T18:00:00"), evening)
    for moment, last in {**moments, "9999-12-31": datetime(9999, 12, 31, tzinfo=UTC).timestamp() + 86_400}.items():
        file = write_tenants(tmp_path / "tenants.json", tenant("acme", key("a", not_after=moment)))
        assert read_tenants(file)[0].keys[0].not_after == last


def test_a_key_in_the_place_of_its_digest_is_not_repeated(tmp_path: Path) -> None:
    secret = "djinn-" + "s" * 43
    file = write_tenants(tmp_path / "tenants.json", tenant("acme", {"sha256": secret}))
    with pytest.raises(FieldOutOfRange, match=r"tenants\.0\.keys\.0\.sha256: 64 lowercase") as refused:
        read_tenants(file)
    assert secret not in refused.value.message


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ([{"name": "acme"}], "tenants.0.keys: required"),
        ([tenant("a"), {**tenant("b"), "name": "b c"}], "tenants.1.name: "),
        ([tenant("a", {"sha256": SHA, "until": "x"})], "tenants.0.keys.0.until: unknown field"),
        ([tenant("a", key("a", not_after="soon"))], "tenants.0.keys.0.not_after: a date such as 2027-01-31"),
        ([tenant("a", key("a", not_before="2027-02-01", not_after="2027-01-01"))], "tenants.0.keys.0.not_after: must"),
        ([tenant("a", role="root")], "tenants.0.role: 'user', 'operator' or 'metrics'; got 'root'"),
        ([tenant("a", session=1)], "tenants.0.limits.session: unknown field"),
        ([tenant("a"), tenant("a", key("b"))], "tenants.1.name: the same as tenants.0.name"),
        ([tenant("a"), tenant("b", key("a"))], "tenants.1.keys.0.sha256: the same as tenants.0.keys.0.sha256"),
    ],
)
def test_a_mistake_is_named_by_its_path(tmp_path: Path, tenants: list[dict[str, Any]], says: str) -> None:
    file = write_tenants(tmp_path / "tenants.json", *tenants)
    with pytest.raises(FieldOutOfRange) as refused:
        read_tenants(file)
    assert f"{file}: {says}" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants: [", "invalid YAML, line 1"),
        ("tenants: []\ntenants: []\n", "invalid YAML, line 2, column 1: tenants is there twice"),
        ("just words", "the file must be an object"),
        ("tenants: [{keys: [{not_after: 2027-02-30}]}]", "invalid YAML, line 1, column 31: day"),
        ("? [tenants]\n: []\n", "invalid YAML, line 1, column 3: a field must have a name"),
        ("deep", "invalid YAML"),
        ("tenants: !!python/object/apply:os.getcwd []", "invalid YAML"),
        ("tenants: [{keys: [{not_after: !!timestamp soon}]}]", "invalid YAML"),
    ],
)
def test_a_file_that_is_no_object(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("[" * 10_000 if text == "deep" else text)
    with pytest.raises(FieldOutOfRange, match=says) as refused:
        read_tenants(file)
    assert "\n" not in refused.value.message


def test_tenants_may_share_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"""
tenants:
  - {{name: one, keys: [{{sha256: {SHA}}}], limits: &usual {{sessions: 5, turns_at_once: 2}}}}
  - {{name: two, keys: [], limits: *usual}}
  - {{name: three, keys: [], limits: {{<<: *usual, turns_at_once: 4}}}}
""")
    limits = [found.limits for found in read_tenants(file)]
    assert limits == [Limits(sessions=5, turns_at_once=turns) for turns in (2, 2, 4)]


@pytest.mark.timeout(20)
def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    with pytest.raises(FieldOutOfRange, match="No such file"):
        read_tenants(file)
    for text, says in (("&a [*a]", "with its anchors"), (" " * (5 << 20), "more than 4 MiB")):
        file.write_text(f"tenants: {text}")
        with pytest.raises(FieldOutOfRange, match=says):
            read_tenants(file)
    for line in ("{0}: &a{0} {{<<: [{1}], k{0}: 1}}", "{0}: &a{0} [{1}]"):  # a short one that grows
        lines = ["0: &a0 {k0: 1}", *(line.format(n, ", ".join([f"*a{n - 1}"] * 10)) for n in range(1, 30))]
        file.write_text("\n".join([*lines, "tenants: *a29"]))
        with pytest.raises(FieldOutOfRange, match=r"with its anchors the file has [0-9]+ values; 1048576 are allowed"):
            read_tenants(file)


def bearer(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def test_each_key_of_a_tenant_reaches_its_sessions_and_no_other_does(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("acme", key("old"), key("new")), tenant("other"), {"name": "none", "keys": []})
    for wrong in ("none", "acme", "Old", "old1", key("old")["sha256"]):
        assert_error(client(wrong).get("/v1/models"), 401, "invalid_api_key")
    session = client("old").post("/v1/sessions").json()
    assert session["tenant"] == "acme"
    assert client("new").get(f"/v1/sessions/{session['id']}").status_code == 200
    assert_error(client("other").get(f"/v1/sessions/{session['id']}"), 404, "not_found", param="session_id")


def test_a_key_is_valid_between_its_dates_and_a_refusal_is_in_the_log(
    serve_tenants: ServeTenants, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one_day = key("k", not_before="2027-02-01", not_after="2027-02-01")
    client = serve_tenants(tenant("acme", one_day, key("f")), tenant("late", key("l", not_after="2026-12-31")))
    assert caplog.messages == ["tenant late has no key that is valid now"]
    for now, status in ((1801439999, 401), (1801440000, 200), (1801526399, 200), (1801526400, 401)):
        clock.now = now
        assert client("k").get("/v1/models").status_code == status, now
    for text in ("l", "l", "f", "nobody's"):
        client(text).get("/v1/models")
    assert [message for message in caplog.messages[1:] if "tenant" in message] == [
        "a key of tenant acme is refused: it is not valid yet",
        "a key of tenant late is refused: it has expired",
    ]


def test_a_websocket_ends_with_its_key_and_is_a_line_when_it_has_closed(
    serve_tenants: ServeTenants, clock: Clock, tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    short, few = key("short", not_after="2027-02-01"), tenant("few", requests_per_minute=2)
    url = serve_tenants(tenant("acme", short), few, audit_log=log)("short").base_url.copy_with(scheme="ws")
    create = json.dumps({"type": "response.create", "model": "tiny-llama", "input": "a", "max_output_tokens": 1})
    refusals = []
    for name, now in (("few", clock.now), ("short", 1801526400)):  # 2027-02-02
        with connect(str(url.join("/v1/responses")), additional_headers=bearer(name)) as socket:
            socket.send(create)
            while json.loads(socket.recv())["type"] not in ("response.completed", "response.incomplete"):
                pass
            clock.now = now
            socket.send(create)
            refusals.append(json.loads(socket.recv()))
    assert [(each["status"], each["error"]["code"]) for each in refusals] == [
        (429, "rate_limit_exceeded"),
        (401, "invalid_api_key"),
    ]
    assert refusals[0]["headers"] == {"Retry-After": "60"}
    found = [(line["tenant"], line["path"], line["status"]) for line in lines(log, 2)]
    assert found == [("few", "/v1/responses", 101), ("acme", "/v1/responses", 101)]


def test_sessions_count_after_a_restart_and_without_their_tenant(tmp_path: Path) -> None:
    file, state = tmp_path / "tenants.json", tmp_path / "state"
    both = tenant("few", sessions=2), tenant("olga", role="operator")
    with serve(tenants=write_tenants(file, *both), state_dir=state) as url, httpx.Client(base_url=url) as http:
        kept = [http.post("/v1/sessions", headers=bearer("few")).json()["id"] for _ in range(2)]
    write_tenants(file, tenant("olga", role="operator"))
    with serve(tenants=file, state_dir=state) as url, httpx.Client(base_url=url) as http:
        assert_error(http.get(f"/v1/sessions/{kept[0]}", headers=bearer("few")), 401, "invalid_api_key")
        listed = http.get("/v1/sessions", headers=bearer("olga")).json()["data"]
        assert {each["id"]: each["tenant"] for each in listed} == dict.fromkeys(kept, "few")
        assert http.delete(f"/v1/sessions/{kept[0]}", headers=bearer("olga")).status_code == 204
    with serve(tenants=write_tenants(file, *both), state_dir=state) as url, httpx.Client(base_url=url) as http:
        assert http.get(f"/v1/sessions/{kept[1]}", headers=bearer("few")).status_code == 200
        assert http.post("/v1/sessions", headers=bearer("few")).status_code == 201
        assert_error(http.post("/v1/sessions", headers=bearer("few")), 429, "tenant_limit")


def test_sighup_reads_the_tenants_again_and_goes_on_in_a_new_audit_log(tmp_path: Path) -> None:
    file, state = write_tenants(tmp_path / "tenants.json", tenant("acme", key("old"))), tmp_path / "state"
    log, audit, before = tmp_path / "state.out", tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    with (
        serve_process(state, "--tenants", str(file), "--audit-log", str(audit)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        path = f"/v1/sessions/{http.post('/v1/sessions', headers=bearer('old')).json()['id']}"
        wait_until(lambda: audit.read_text() != "")
        audit.rename(before)
        write_tenants(file, tenant("acme", key("new")))
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: http.get(path, headers=bearer("new")).status_code == 200)
        assert_error(http.get(path, headers=bearer("old")), 401, "invalid_api_key")
        wait_until(lambda: any(json.loads(line)["status"] == 401 for line in audit.read_text().splitlines()))
        assert len(before.read_text().splitlines()) == 1
        told = log.read_text()
        write_tenants(file, tenant("acme", role="root"))
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: log.read_text() != told)
        assert http.get(path, headers=bearer("new")).status_code == 200
        (line,) = log.read_text().removeprefix(told).splitlines()
        assert "tenants.0.role: " in line
        assert "; the tenants stay as they were" in line


SECRET = "swordfish"
FIELDS = {"time", "tenant", "request_id", "method", "path", "session", "status"}


def lines(log: Path, count: int) -> list[dict[str, Any]]:
    """The log once it has so many lines: a line follows the answer that it is about."""
    wait_until(lambda: len(log.read_text().splitlines()) >= count)
    found = log.read_text().splitlines()
    assert len(found) == count
    return [json.loads(line) for line in found]


def test_a_line_for_each_request_says_what_it_wanted(serve_tenants: ServeTenants, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    client = serve_tenants(tenant("acme"), tenant("watch", role="metrics"), audit_log=log)
    http = client("acme")
    session = http.post("/v1/sessions", headers={"X-Request-Id": "r1"}).json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"prompt": "hi", "max_tokens": 1, "stream": True})
    chat = {"model": "tiny-llama", "prompt": "hi", "max_tokens": 1}
    bound = http.post("/v1/completions", json=chat, headers={"X-Session-ID": "mine"}).headers["x-session-id"]
    http.get("/v1/sessions/ses_1")
    http.get("/no/such/path")
    http.get("/metrics")
    http.post("/v1/sessions", content="{}", headers={"Content-Encoding": "br"})
    client("watch").get(f"/v1/sessions/{session}/history")
    client("wrong").delete(f"/v1/sessions/{session}")
    found = lines(log, 9)
    assert all(line.keys() == FIELDS for line in found)
    assert found[0]["request_id"] == "r1"
    assert [(line["tenant"], line["method"], line["path"], line["session"], line["status"]) for line in found] == [
        ("acme", "POST", "/v1/sessions", session, 201),
        ("acme", "POST", "/v1/sessions/{session_id}/generate", session, 200),
        ("acme", "POST", "/v1/completions", bound, 200),
        ("acme", "GET", "/v1/sessions/{session_id}", None, 404),
        ("acme", "GET", None, None, 404),
        ("acme", "GET", "/metrics", None, 403),
        ("acme", "POST", "/v1/sessions", None, 415),
        ("watch", "GET", "/v1/sessions/{session_id}/history", session, 403),
        (None, "DELETE", "/v1/sessions/{session_id}", session, 401),
    ]
    assert log.stat().st_mode & 0o777 == 0o600


def test_no_line_holds_what_was_said(serve_tenants: ServeTenants, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    http = serve_tenants(tenant("acme", key(SECRET)), audit_log=log)(SECRET)
    session = http.post("/v1/sessions", json={"metadata": {"a": SECRET}}).json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"prompt": SECRET, "max_tokens": 1})
    http.post(f"/v1/sessions/{SECRET}/generate", json={"prompt": SECRET})
    http.get(f"/{SECRET}?{SECRET}={SECRET}")
    http.post("/v1/completions", json={"model": SECRET, "prompt": SECRET}, headers={"X-Session-ID": SECRET})
    http.post("/v1/messages", json={"model": "tiny-llama", "max_tokens": 1, "system": SECRET, "messages": []})
    http.request(SECRET, "/v1/models")  # any word is a method in HTTP
    found = lines(log, 7)
    assert found[-1]["method"] is None
    assert SECRET not in log.read_text().lower()

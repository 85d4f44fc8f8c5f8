"""Phases of sessions, and where their KV is."""

import json
import time
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.events.streaming import reading
from tests.routers.breakpoints.pausing import generate, open_session
from tests.routers.generating import CONTEXT, GREEDY, PROMPT, in_tier, streaming, wait_for
from tests.serving import own_server
from tests.tenants.tenant_files import tenant, write_tenants


@pytest.mark.parametrize(
    ("phase", "resume_in_ms"),
    [("io_wait", 0), ("io_wait", 2.5), ("idle", 86_400_000), ("ready", None), ("compute", None)],
)
def test_a_session_tells_its_phase(http: httpx.Client, session: str, phase: str, resume_in_ms: float | None) -> None:
    answer = http.post(f"{session}/phase", json={"phase": phase, "resume_in_ms": resume_in_ms})
    assert (answer.status_code, answer.json()) == (200, {"phase": phase, "tier": None, "moving": None})
    found = http.get(session).json()
    assert found["phase"] == phase
    back_at = None if resume_in_ms is None else pytest.approx(time.time() + resume_in_ms / 1000, abs=10)
    assert found["returns_at"] == back_at
    http.post(f"{session}/generate", json={**GREEDY, "token_ids": [5], "max_tokens": 0}).raise_for_status()
    found = http.get(session).json()
    assert (found["phase"], found["returns_at"]) == ("compute", None), "a turn ends the wait"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "phase", "required"),
        ({"phase": "idle", "resume_in_ms": 86_400_001}, "resume_in_ms", "86400000; got 86400001"),
        ({"phase": "ready", "resume_in_ms": 5}, "resume_in_ms", "goes with phase io_wait or idle, not with ready"),
        ({"phase": "compute", "resume_in_ms": 5}, "resume_in_ms", "not with compute"),
    ],
)
def test_a_bad_field_changes_nothing(
    http: httpx.Client, session: str, body: dict[str, object], param: str, says: str
) -> None:
    message = assert_error(http.post(f"{session}/phase", json=body), 422, "field_out_of_range", param=param)
    assert message.startswith(param)
    assert says in message
    assert http.get(session).json()["phase"] == "compute"


@pytest.mark.usefixtures("slow_steps")
def test_a_session_with_a_turn_in_it_computes_whatever_it_says(http: httpx.Client, session: str) -> None:
    with streaming(http, session, **PROMPT, max_tokens=900) as stream:
        next(stream)
        refused = http.post(f"{session}/phase", json={"phase": "io_wait"})
        assert "is running" in assert_error(refused, 409, "wrong_state")
        assert http.get(session).json()["phase"] == "compute"


@pytest.mark.parametrize(("room", "says"), [("0", ""), ("1x96", "a session of 96 tokens"), ("1x1024", "")])
def test_what_fits_nowhere_stays(serve_with: ServeWith, caplog: pytest.LogCaptureFixture, room: str, says: str) -> None:
    http = serve_with(kv_host=room)
    assert (says in caplog.text, "--kv-host" in caplog.text) == (True, bool(says))
    generate(http, session := open_session(http), **CONTEXT)
    moving = http.post(f"{session}/phase", json={"phase": "idle"}).json()["moving"]
    assert moving is None or room == "1x1024"
    wait_for(http, session, in_tier("host" if room == "1x1024" else "device"))


def test_in_io_wait_the_device_is_free_and_nothing_is_computed_twice(serve_with: ServeWith) -> None:
    http = serve_with()
    waits, stays = open_session(http), open_session(http)
    generate(http, waits, **CONTEXT)
    generate(http, stays, **{**CONTEXT, "token_ids": [9, *CONTEXT["token_ids"]]})
    held = http.get(waits).json()["kv"]
    change = http.post(f"{waits}/phase", json={"phase": "io_wait"}).json()
    assert change["phase"] == "io_wait"
    assert change["moving"] is None or (change["moving"]["to"], change["moving"]["bytes"] > 0) == ("host", True)
    away = wait_for(http, waits, in_tier("host"))
    assert away["kv"]["host_bytes"] >= held["device_bytes"] > away["kv"]["device_bytes"] == 0
    assert away["usage"]["bytes_out"] > 0
    memory = http.get("/v1/memory").json()
    assert memory["data"]["device"]["owned_bytes"] == http.get(stays).json()["kv"]["device_bytes"]
    assert (memory["sessions_by_tier"]["host"], memory["sessions_by_tier"]["device"]) == (1, 1)
    turn = generate(http, waits)
    assert turn["usage"]["tokens_recomputed"] == 0
    back = http.get(waits).json()
    assert (back["phase"], back["kv"]["tier"]) == ("compute", "device")
    assert back["usage"]["restores"] == 1
    assert back["usage"]["bytes_in"] > 0
    assert back["usage"]["resume_ms"]["restore"] > 0
    generate(http, unmoved := open_session(http), **CONTEXT)
    assert generate(http, unmoved)["token_ids"] == turn["token_ids"]


@pytest.mark.parametrize(
    ("wait", "then"), [({"phase": "io_wait", "resume_in_ms": 1000}, None), ({"phase": "io_wait"}, {"phase": "ready"})]
)
def test_kv_is_back_before_the_next_turn(
    http: httpx.Client, session: str, wait: dict[str, object], then: dict[str, object] | None
) -> None:
    generate(http, session, **CONTEXT)
    http.post(f"{session}/phase", json=wait)
    if then is not None:
        wait_for(http, session, in_tier("host"))
        assert http.post(f"{session}/phase", json=then).json()["phase"] == "ready"
    back = wait_for(http, session, lambda found: bool(found["usage"]["restores"]))
    assert (back["phase"], back["kv"]["tier"]) == ("io_wait" if then is None else "ready", "device")
    assert back["usage"]["restores"] == 1
    generate(http, session)
    assert http.get(session).json()["usage"]["resume_ms"]["restore"] == 0


ACME, OLGA = {"X-Api-Key": "acme"}, {"X-Api-Key": "olga"}


def look(http: httpx.Client, session: str) -> list[int]:
    """The bytes of the device that each place tells of, in the order in which they are asked."""
    with reading(http, **ACME) as reader:
        [told] = reader.next()[1]["sessions"]
    [listed] = http.get("/v1/sessions", headers=ACME).json()["data"]
    view = http.get(f"/v1/sessions/{session}", headers=ACME).json()
    own = http.get("/v1/memory", headers=ACME).json()
    as_operator = http.get("/v1/memory", headers=OLGA).json()
    metrics = http.get("/metrics", headers=OLGA).text.splitlines()
    [metric] = [each for each in metrics if each.startswith('djinn_tenant_kv_bytes{tenant="acme",tier="device"}')]
    assert view["state"] == "running"
    of_sessions = [each["kv"]["device_bytes"] for each in (told, listed, view)]
    of_tenant = [own["data"]["device"]["owned_bytes"], as_operator["tenants"]["acme"]["device_bytes"]]
    return [*of_sessions, *of_tenant, int(float(metric.split()[-1]))]


def test_kv_of_a_running_turn_grows_wherever_one_looks(roomy_model: Path, tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"), tenant("olga", role="operator"))
    with own_server(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20, tenants=file) as http:
        session = http.post("/v1/sessions", headers=ACME).json()["id"]
        block = http.get("/v1/memory", headers=OLGA).json()["data"]
        body = {"token_ids": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"/v1/sessions/{session}/generate", json=body, headers=ACME) as turn:
            lines = (json.loads(line[5:]) for line in turn.iter_lines() if line.startswith("data:"))
            seen = sum(len(event["token_ids"]) for event in islice(lines, 300))
            found = look(http, session)
            assert found == sorted(found), "each was asked after the one before"
            assert found[0] >= seen // block["block_tokens"] * block["block_bytes"]

"""What an operator does with replicas: hangs up, and reads the audit log."""

import json
import os
import signal
from pathlib import Path

import httpx

from tests.cluster.pair import behind, pair
from tests.processes import serve_process
from tests.tenants.tenant_files import tenant, write_tenants
from tests.tenants.test_keys import bearer
from tests.waiting import wait_until


def test_a_replica_without_files_goes_on_when_it_hears_a_hangup(tmp_path: Path) -> None:
    """Its keeper passes on what it hears."""
    with serve_process(tmp_path / "state", "--replica", "a") as server:
        os.kill(server.pid, signal.SIGHUP)
        assert server.exit_status(0.3) is None
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_request_leaves_one_line_in_the_audit_log_where_it_was_made(tmp_path: Path) -> None:
    file, logs = write_tenants(tmp_path / "tenants.json", tenant("acme")), {}
    with pair(tmp_path / "pair", start=False) as servers:
        for name in ("a", "b"):
            logs[name] = tmp_path / f"{name}.jsonl"
            servers.start(name, "--tenants", str(file), "--audit-log", str(logs[name]))
        servers.headers = bearer("acme")
        with behind(servers, "b") as http:
            session = ""
            while not session.startswith("ses_a_"):  # which `b` may see late
                session = http.post("/v1/sessions", json={}).json().get("id", "")
            http.get(f"/v1/sessions/{session}").raise_for_status()
            http.get("/v1/memory").raise_for_status()
            wait_until(lambda: "/v1/memory" in logs["b"].read_text())
        assert logs["a"].read_text() == ""
        every = [json.loads(line) for line in logs["b"].read_text().splitlines()]
        lines = [line for line in every if line["method"] == "GET"]
    assert [(line["tenant"], line["path"], line["status"]) for line in lines] == [
        ("acme", "/v1/sessions/{session_id}", 200),
        ("acme", "/v1/memory", 200),
    ]
    assert lines[0]["session"] == session

"""What an operator does with a front door and its replicas: hangs up, and reads the audit log."""

import json
import logging
import os
import signal
from pathlib import Path

import httpx
import pytest

from app.web.server import Hangups
from tests.cluster.front.doors import serving_door, serving_stub
from tests.cluster.front.test_moved import Stub
from tests.processes import serve_process
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants
from tests.tenants.test_keys import bearer
from tests.waiting import wait_until


def test_a_door_without_files_goes_on_when_it_hears_a_hangup(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "app"),
        Hangups.heard() as hangups,
        serving_stub(Stub("a")) as url,
        serving_door({"a": url}, hangups=hangups) as door,
    ):
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: "no file to reload" in caplog.text)
        assert not door.server.should_exit
        assert httpx.get(f"{door.url}/ready").status_code == 200


def test_a_door_reads_its_tenants_again(tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"))
    with (
        Hangups.heard() as hangups,
        serving_stub(Stub("a")) as url,
        serving_door({"a": url}, hangups=hangups, tenants=file) as door,
    ):
        write_tenants(file, tenant("other"))
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: door.server.front.tenancy.directory.named("other") is not None)


def test_a_replica_without_files_goes_on_too(tmp_path: Path) -> None:
    """A front door passes on what it hears."""
    with serve_process(tmp_path / "state", "--replica", "a") as server:
        os.kill(server.pid, signal.SIGHUP)
        assert server.exit_status(0.3) is None
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_doors_looks_leave_no_line_in_the_audit_log_and_requests_of_others_do(tmp_path: Path) -> None:
    log, file = tmp_path / "audit.jsonl", write_tenants(tmp_path / "tenants.json", tenant("acme"))
    with serve(replica="a", audit_log=log, tenants=file) as url:
        with serving_door({"a": url}, tenants=file) as door:
            wait_until(lambda: httpx.get(f"{door.url}/ready").status_code == 200)
            httpx.get(f"{door.url}/v1/sessions", headers=bearer("acme")).raise_for_status()
        looks = {"User-Agent": "front"}
        httpx.get(f"{url}/ready", headers={**looks, **bearer("acme")}).raise_for_status()
        httpx.get(f"{url}/ready", headers={**looks, **bearer("guessed")}).raise_for_status()
        httpx.get(f"{url}/ready").raise_for_status()
        httpx.get(f"{url}/v1/models", headers=looks)
        wait_until(lambda: len(log.read_text().splitlines()) >= 5)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["tenant"], line["path"], line["status"]) for line in found] == [
        ("acme", "/v1/sessions", 200),
        ("acme", "/ready", 200),
        (None, "/ready", 200),
        (None, "/ready", 200),
        (None, "/v1/models", 401),
    ]

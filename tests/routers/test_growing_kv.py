"""KV of a turn that runs grows wherever one looks: nobody waits for the turn's end to see it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import httpx

from tests.events.streaming import reading
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

TOKENS = 300
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
    return [
        told["kv"]["device_bytes"],
        listed["kv"]["device_bytes"],
        view["kv"]["device_bytes"],
        own["data"]["device"]["owned_bytes"],
        as_operator["tenants"]["acme"]["device_bytes"],
        int(float(metric.split()[-1])),
    ]


def test_kv_of_a_running_turn_grows_wherever_one_looks(roomy_model: Path, tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"), tenant("olga", role="operator"))
    with (
        serve(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20, tenants=file) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        session = http.post("/v1/sessions", headers=ACME).json()["id"]
        block = http.get("/v1/memory", headers=OLGA).json()["data"]
        body = {"token_ids": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"/v1/sessions/{session}/generate", json=body, headers=ACME) as turn:
            lines = (json.loads(line[5:]) for line in turn.iter_lines() if line.startswith("data:"))
            seen = sum(len(event["token_ids"]) for event in islice(lines, TOKENS))
            least = seen // block["block_tokens"] * block["block_bytes"]
            found = look(http, session)
            assert found == sorted(found), "each was asked after the one before"
            assert found[0] >= least
        http.delete(f"/v1/sessions/{session}", headers=ACME)

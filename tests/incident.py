"""What an operator is woken for, planted on one server."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

NAMED = (
    r"the disk of \S+ is nearly full: .* are left beside the .* for the journal",
    r"\d turns in the queue, \d of them of tenant greedy",
    r"tenant many is at its limits: 1 request refused in a minute",
    r"hoarder \(…\w{8}\) holds 4\d% of the device, and has signalled nothing",
)
"""How an operator hears of each part."""


@contextmanager
def incident(folder: Path) -> Iterator[dict[str, httpx.Client]]:
    """Clients of each tenant. `agents` has one that never signals and holds two fifths of the device, `greedy` floods
    the queue, `many` asks too often, and the disk is nearly full.
    """
    tenants = [tenant(name, role=role) for name, role in (("agents", "operator"), ("greedy", "user"))]
    file = write_tenants(folder / "tenants.json", *tenants, tenant("many", requests_per_minute=1))
    reserve, over = shutil.disk_usage(folder).free * 3 // 5, threading.Event()

    def flood(http: httpx.Client) -> None:
        while not over.is_set():
            take_turn(http, tokens=40, most=200)

    with (
        serve(tenants=file, state_dir=folder / "state", disk_reserve=reserve, kv_device=2 << 20, max_running=1) as url,
        ThreadPoolExecutor(4) as pool,
        ExitStack() as ends,
    ):
        of = {
            name: ends.enter_context(httpx.Client(base_url=url, timeout=60, headers={"X-Api-Key": name}))
            for name in ("agents", "greedy", "many")
        }
        take_turn(of["agents"], tokens=850, closes=False, name="hoarder")
        statuses = [of["many"].get("/v1/sessions").status_code for _ in range(2)]
        assert statuses == [200, 429]
        ends.callback(over.set)
        for _ in range(4):
            pool.submit(flood, of["greedy"])
        yield of


def take_turn(http: httpx.Client, *, tokens: int, most: int = 0, closes: bool = True, **metadata: str) -> None:
    path = "/v1/sessions/" + http.post("/v1/sessions", json={"metadata": metadata}).raise_for_status().json()["id"]
    body = {"token_ids": [5 + at % 90 for at in range(tokens)], "max_tokens": most, "ignore_eos": True}
    http.post(f"{path}/generate", json=body).raise_for_status()
    if closes:
        http.delete(path)

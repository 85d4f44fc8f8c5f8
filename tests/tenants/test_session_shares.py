"""Sessions of a tenant leave places to others."""

from __future__ import annotations

import httpx

from app.domain.errors import SessionLimit
from app.sessions.places import HELD_FOR_A_FREE
from app.sessions.session import Session
from app.sessions.table import SessionTable, new_session_id
from app.tenants.tenancy import Tenancy
from tests.errors import assert_error
from tests.serving import tiny_settings
from tests.tenants.conftest import ServeTenants
from tests.tenants.tenant_files import tenant


def open_all(http: httpx.Client) -> tuple[int, httpx.Response]:
    """How many sessions the tenant can open, and the refusal of the next."""
    opened = 0
    while (answer := http.post("/v1/sessions")).status_code == 201:
        opened += 1
    return opened, answer


def test_a_tenant_that_opens_sessions_without_end_leaves_some_to_another(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("greedy"), tenant("quiet"), max_sessions=18)
    opened, refusal = open_all(client("greedy"))
    assert opened == 16
    assert "this tenant has 16 of the 18 sessions" in assert_error(refusal, 429, "session_limit")
    assert open_all(client("quiet"))[0] == 2


def test_without_tenants_one_client_may_have_all() -> None:
    table = SessionTable(18, Tenancy(tiny_settings(), lambda: 0.0).quotas)
    assert open_in(table, None, 30) == 18


def open_in(table: SessionTable, owner: str | None, wanted: int) -> int:
    for number in range(wanted):
        try:
            table.giving_way(owner, 1)
        except SessionLimit:
            return number
        table.add(Session(new_session_id(), owner))
    return wanted


def test_after_three_greedy_tenants_a_fourth_finds_places() -> None:
    table = SessionTable(4096, Tenancy(tiny_settings(), lambda: 0.0).quotas)
    opened = [open_in(table, owner, 5000) for owner in "abcd"]
    assert opened[0] == -(-4096 * HELD_FOR_A_FREE // (HELD_FOR_A_FREE + 1))
    assert min(opened) >= 1

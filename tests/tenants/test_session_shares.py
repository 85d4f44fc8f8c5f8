"""Sessions of a tenant leave places to others."""

from __future__ import annotations

import httpx

from app.domain.errors import SessionLimit
from app.domain.session_ids import new_session_id
from app.sessions.places import HELD_FOR_A_FREE
from app.sessions.session import UNNAMED, Session
from app.sessions.table import SessionTable
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
    table = SessionTable(18, Tenancy(tiny_settings(), lambda: 0.0).quotas)
    assert open_in(table, None, 30) == 18, "without tenants one client may have all"


def fill(table: SessionTable, **held: int) -> None:
    """Idle sessions that unnamed calls have opened: they give way."""
    for owner, count in held.items():
        for _ in range(count):
            table.add(Session(new_session_id(), owner, name=UNNAMED))


def test_a_tenant_without_sessions_gets_a_place_of_one_that_gives_way() -> None:
    table = SessionTable(100, Tenancy(tiny_settings(), lambda: 0.0).quotas)
    fill(table, b=89, c=10, d=1)
    assert len(table.giving_way("e", 1)) == 1


def test_places_that_others_have_taken_since_push_out_no_more_than_one_opens() -> None:
    table = SessionTable(100, Tenancy(tiny_settings(), lambda: 0.0).quotas)
    fill(table, b=89)
    for _ in range(10):
        table.add(Session(new_session_id(), "c"))
    assert [session.owner for session in table.giving_way("b", 1)] == ["b"]

"""What replicas and the front door are asked at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from loadgen.errors import NotAsMeant
from loadgen.experiments.cluster import checking
from loadgen.experiments.cluster.agent import ClusterAgent
from loadgen.experiments.cluster.checking import check_owners, read_routing
from loadgen.experiments.cluster.findings import Findings, Routing
from tests.loadgen.stubs import serving

METRICS = """
# TYPE djinn_front_requests_total counter
djinn_front_requests_total{replica="front",turn="yes",way="owner"} 90.0
djinn_front_requests_total{replica="front",turn="yes",way="followed"} 2.0
djinn_front_requests_total{replica="front",turn="yes",way="moving_on"} 0.0
djinn_front_requests_total{replica="front",turn="yes",way="away"} 7.0
djinn_front_requests_total{replica="front",turn="yes",way="lost"} 1.0
djinn_front_requests_total{replica="front",turn="no",way="owner"} 500.0
djinn_front_requests_created{replica="front",turn="yes",way="owner"} 1.7e+09
"""


def replica(**statuses: int) -> ASGIApp:
    """A replica that answers so to the sessions of these names, and 404 to others."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status = statuses.get(scope["path"].rpartition("/")[2], 404)
        await JSONResponse({}, status)(scope, receive, send)

    return app


def agents(*names: str) -> list[ClusterAgent]:
    return [cast("ClusterAgent", SimpleNamespace(session=SimpleNamespace(id=name))) for name in names]


async def test_sessions_are_counted_by_how_many_replicas_have_them() -> None:
    findings = Findings()
    with serving(replica(one=200, two=200)) as a, serving(replica(one=421, two=200)) as b:
        await check_owners({"a": a, "b": b}, agents("one", "two", "none"), findings)
    assert findings.owners == {0: 1, 1: 1, 2: 1}


async def test_a_replica_that_cannot_say_is_asked_until_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SETTLED_S", 0.0)
    with serving(replica(one=409)) as a, pytest.raises(NotAsMeant, match="status 409"):
        await check_owners({"a": a}, agents("one"), Findings())


def test_only_turns_count_for_affinity() -> None:
    assert read_routing(METRICS) == Routing(owner=90, followed=2, moving_on=0, away=7, lost=1)

"""What each request passes on its way to a route."""

from collections.abc import Mapping

from starlette.middleware import Middleware
from starlette.types import Scope

from app.cluster.moves.cluster import Cluster
from app.cluster.moves.doors import ClusterDoors, Way
from app.journal.lease import FolderLease
from app.routers.export import IMPORT_PATH
from app.sessions.keyed import KeyedRequests
from app.settings import Settings
from app.tenants.audit import AuditMiddleware
from app.tenants.gate import TenantMiddleware, import_limit
from app.tenants.tenancy import Tenancy
from app.web.connections.body_budget import BodyBudget
from app.web.middleware.access_log import AccessLogMiddleware
from app.web.middleware.body_limit import BodyLimitMiddleware
from app.web.middleware.cors import cross_origin
from app.web.middleware.hosts import HostMiddleware
from app.web.middleware.idempotency import IdempotencyMiddleware
from app.web.middleware.lease_gate import LeaseGate
from app.web.middleware.trace_response import TraceResponseMiddleware
from app.web.request_id import RequestIdMiddleware


def middleware(
    settings: Settings,
    tenancy: Tenancy,
    lease: FolderLease | None,
    cluster: Cluster | None,
    ways: Mapping[str, Way],
    keyed: KeyedRequests,
    *,
    is_traced: bool,
) -> list[Middleware]:
    """All of it, outermost first. `lease` is that of the state folder. `ways` are those of the cluster, beside that of
    sessions. `is_traced`: answers name the trace of their turn.
    """

    def most_imported(scope: Scope) -> int:
        own = import_limit(scope)
        return int(settings.max_import_bytes) if own is None else min(own, int(settings.max_import_bytes))

    audit = [] if tenancy.audit is None else [Middleware(AuditMiddleware, log=tenancy.audit, clock=tenancy.clock)]
    access = [Middleware(AccessLogMiddleware)] if settings.access_log else []
    spans = [Middleware(TraceResponseMiddleware)] if is_traced else []
    gate = [] if lease is None else [Middleware(LeaseGate, lease=lease)]
    doors = [] if cluster is None else [_doors(cluster, ways)]
    return [
        Middleware(RequestIdMiddleware),
        *spans,
        *access,
        *audit,
        *gate,
        *doors,
        *cross_origin(settings.cors_origins),
        Middleware(
            HostMiddleware,
            hosts=settings.answered_hosts,
            origins=settings.cors_origins,
            needs_key=settings.needs_key,
        ),
        Middleware(TenantMiddleware, directory=tenancy.directory, quotas=tenancy.quotas),
        Middleware(
            BodyLimitMiddleware,
            max_bytes=min(int(settings.max_request_bytes), int(settings.max_bodies_bytes)),
            routes={("POST", IMPORT_PATH): most_imported},
            budget=BodyBudget(int(settings.max_bodies_bytes)),
        ),
        Middleware(IdempotencyMiddleware, requests=keyed),
    ]


def _doors(cluster: Cluster, ways: Mapping[str, Way]) -> Middleware:
    """Before the gates for clients: other servers have no key of a tenant."""
    member = cluster.member
    return Middleware(ClusterDoors, here=member.here, key=member.key, arrivals=cluster.arrivals, ways=ways)

"""The server itself: alive, ready, metrics, version, memory, its events and its page."""

import asyncio
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.domain.errors import DjinnError, EngineAway, EngineError, NotFound, Restated
from app.domain.values import NO_LIMITS, KVPolicy
from app.events import Scope
from app.routers.dependencies import CleanupDep, OperatorDep, OwnerDep, ServicesDep, errors
from app.sessions.registry import PATIENCE_S
from app.web.bodies import JsonRoute
from app.web.openapi import component
from app.web.sse import EventStream
from app.web.static_folder import StaticFolder
from app.wire.base import ErrorBody, Status, Version
from app.wire.history import Activity, ActivityQuery, FindingsView, LiveEvent
from app.wire.memory import CapacityBody, CapacityEstimate, EstimateQuery, MemoryEstimate, MemoryView, TenantUseView
from app.wire.points import PointList

VERSION = version("djinn-server")
"""Read once: the package's metadata is parsed each time."""

router = APIRouter(tags=["system"])
capacity_router = APIRouter(tags=["system"], route_class=JsonRoute)


@router.get("/health", operation_id="getHealth", responses={422: {"model": ErrorBody}})
async def get_health() -> Status:
    """Whether the process is alive. Needs no API key."""
    return Status(status="ok")


@router.get("/ready", operation_id="getReady", responses=errors(503))
async def get_ready(request: Request, services: ServicesDep) -> Status:
    """Whether new work is taken: 503 while the server shuts down, while its engine restarts or makes no progress,
    while its journal cannot be written, and while it has no lease of its state folder; 500 if the engine has failed for
    good. Needs no API key. Without one, the answer says no more than the error's code. With one, the message tells why.
    """
    # A tenant, or any caller where no key is needed.
    is_known = not services.tenancy.directory or request.state.tenant is not None
    try:
        services.require_ready()
    except DjinnError as error:
        if is_known:
            raise
        raise Restated(error, message=f"no new work is taken: {error.code}") from error
    return Status(status="ready")


@router.head("/metrics", include_in_schema=False)
@router.get(
    "/metrics",
    operation_id="getMetrics",
    response_class=Response,
    responses={**errors(), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def get_metrics(services: ServicesDep) -> Response:
    """Metrics for Prometheus. Those of the engine are missing while there is none, or if it does not answer."""
    executor, memory = services.sessions.executor, None
    try:
        async with asyncio.timeout(PATIENCE_S):
            memory = await services.sessions.memory()
    except TimeoutError:
        pass
    except (EngineError, EngineAway):
        if executor.is_up:
            raise
    sessions = services.sessions.table.by_owner()
    tenants = {owner or "": TenantUseView.of(each).model_dump() for owner, each in sessions.items()}
    found = services.metrics.render(memory, services.sessions.keeper.state, tenants, is_up=executor.is_up)
    return Response(found, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", operation_id="getVersion", responses=errors())
async def get_version(services: ServicesDep) -> Version:
    """What runs here."""
    chat = services.tokens.chat_template is not None
    return Version(version=VERSION, model=services.info.name, chat=chat, **asdict(services.info))


@router.get("/v1/points", operation_id="listPoints", responses=errors())
async def list_points(services: ServicesDep) -> PointList:
    """The points of the model's forward pass that breakpoints can name."""
    return PointList.of(services.info.points)


@router.get("/v1/memory", operation_id="getMemory", responses=errors())
async def get_memory(services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep) -> MemoryView:
    """Budgets and use of the memory segments in bytes, and what has moved between the tiers. An operator also sees what
    each tenant has; any other tenant sees only its own part.
    """
    memory, policy = await services.sessions.memory(), KVPolicy(services.settings.kv_policy)
    table = services.sessions.table
    if is_operator:
        return MemoryView.of(memory, policy).with_tenants(table.by_owner())
    if owner is None:
        return MemoryView.of(memory, policy)
    return MemoryView.of_one(memory, policy, list(table.owned_by(owner)))


@router.get("/v1/memory/estimate", operation_id="estimateMemory", responses=errors())
async def estimate_memory(query: Annotated[EstimateQuery, Query()], services: ServicesDep) -> MemoryEstimate:
    """What a session of `tokens` tokens takes, how many the device holds at once, and how long one takes to move."""
    return MemoryEstimate.of(await services.sessions.memory(), query.tokens, query.bandwidth)


@capacity_router.post("/v1/capacity/estimate", operation_id="estimateCapacity", responses=errors(400, 503))
async def estimate_capacity(
    body: CapacityBody, services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep
) -> CapacityEstimate:
    """How many more agents fit, by measured times of steps and moves. A tenant is told of its own limits, and what the
    server would have room for if it were alone.
    """
    sees_all, table = is_operator or owner is None, services.sessions.table
    found = services.findings.load.estimate(
        await services.sessions.memory(),
        list(table if sees_all else table.owned_by(owner)),
        body.model_dump(exclude_none=True),
        NO_LIMITS if sees_all else services.tenancy.quotas.limits(owner),
        sees_all=sees_all,
        longest=services.info.max_model_len,
    )
    return CapacityEstimate.model_validate(found)


@router.get("/v1/activity", operation_id="getActivity", response_model=Activity, responses=errors(503))
async def get_activity(
    query: Annotated[ActivityQuery, Query()], services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep
) -> Any:
    """The last 30 days by the minute: the caller's sessions, or those of all tenants for an operator."""
    minutes, marks = await services.history.activity(
        owner, is_operator=is_operator, since=query.since, step_s=query.step_s, limit=query.limit + 1
    )
    marks = [{**each, "replica": services.settings.replica} for each in marks]
    return {"minutes": minutes[: query.limit], "marks": marks, "has_more": len(minutes) > query.limit}


@router.get("/v1/findings", operation_id="getFindings", responses=errors())
async def get_findings(services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep) -> FindingsView:
    """What is wrong, in sentences, the gravest first, and how many more agents there is room for. A tenant hears of its
    own sessions, an operator also of the server. It answers while the engine is away, too.
    """
    memory = await services.sessions.try_memory()
    return FindingsView.of(services.findings, memory, owner, is_operator=is_operator)


page_router = APIRouter(include_in_schema=False)

FILES = StaticFolder(Path(__file__).parents[1] / "static", "static/")


@page_router.head("/")
@page_router.get("/")
async def get_page(request: Request) -> Response:
    """The inspector."""
    return await _file(request, "index.html")


@page_router.head("/docs")
@page_router.get("/docs")
async def get_docs(request: Request) -> Response:
    """All routes, to read and to try."""
    return await _file(request, "docs.html")


@page_router.head("/static/{name:path}")
@page_router.get("/static/{name:path}")
async def get_static(request: Request, name: str) -> Response:
    """One file of `app/static/`."""
    return await _file(request, name)


async def _file(request: Request, name: str) -> Response:
    response = await FILES.respond(request, name)
    if response is None:
        raise NotFound(f"no such file: {name}")
    return response


LastEventId = Annotated[
    str | None, Header(description="the last id of a stream that was read before: the new one goes on from there")
]


@router.get(
    "/v1/events",
    operation_id="streamEvents",
    status_code=200,
    response_class=Response,
    responses={
        **errors(503),
        200: {
            "description": "A `snapshot`, then events as they happen.",
            "content": {EventStream.media_type: {"schema": component(LiveEvent)}},
        },
    },
)
async def stream_events(
    request: Request,
    services: ServicesDep,
    owner: OwnerDep,
    is_operator: OperatorDep,
    cleanup: CleanupDep,
    last_event_id: LastEventId = None,
) -> EventStream:
    """What happens to the caller's sessions, for an operator to those of all tenants, and memory every second."""
    scope = Scope(owner, is_operator)
    channel = cleanup.enter_context(services.events.reading(scope))
    return EventStream(services.events.events(scope, channel, last_event_id, request.state.may_go_on))

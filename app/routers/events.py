"""The live stream of what happens to sessions."""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from app.events.feed import Scope
from app.routers.dependencies import CleanupDep, OperatorDep, OwnerDep, ServicesDep, errors
from app.web.openapi.document import component
from app.web.sse import EventStream
from app.wire.live import LiveEvent

router = APIRouter(tags=["system"])

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

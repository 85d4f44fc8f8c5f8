"""The end of a pause."""

from fastapi import APIRouter, Request, Response

from app.domain.errors import Draining, Moving, WrongState
from app.routers.dependencies import CleanupDep, OwnerDep, ServicesDep, SessionDep, errors
from app.routers.edits import to_edits
from app.routers.turn_answer import TURN_RESPONSES, answer_turn
from app.web.json_body import JsonRoute
from app.wire.checkpoint import ResumeBody
from app.wire.turns import TurnView

router = APIRouter(prefix="/v1/sessions", tags=["breakpoints"], route_class=JsonRoute)

TO_THE_NEXT_BREAKPOINT = ResumeBody()


@router.post(
    "/{session_id}/resume",
    operation_id="resumeSession",
    response_model=TurnView,
    responses={**errors(400, 404, 409, 503), **TURN_RESPONSES},
)
async def resume_session(
    request: Request,
    session: SessionDep,
    services: ServicesDep,
    owner: OwnerDep,
    cleanup: CleanupDep,
    body: ResumeBody = TO_THE_NEXT_BREAKPOINT,
) -> Response:
    """Go on with a paused turn, to its next pause or its end. A client that disconnects while it runs cancels it."""
    registry, until = services.sessions, body.to_until()
    registry.pauses.check_resume(session, until)
    if body.edits is not None:
        await registry.checkpoints.edit(session, to_edits(body.edits, services, owner))
    try:
        reader = registry.pauses.resume(session, until)
    except (Draining, Moving) as error:  # a retry of the whole request would edit it twice
        if body.edits is None:
            raise
        raise WrongState(
            f"the edits are made, but the turn is not resumed: {error.message}; resume it alone"
        ) from error
    cleanup.callback(registry.ends.release, session, reader.turn)
    return await answer_turn(request, session, reader, stream=body.stream)

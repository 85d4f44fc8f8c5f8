"""What a session's client is doing: the signal that KV moves on."""

from fastapi import APIRouter

from app.domain.values import KVBudget, KVPolicy
from app.routers.dependencies import ServicesDep, SessionDep, errors
from app.web.json_body import JsonRoute
from app.wire.sessions import PhaseBody, PhaseView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)


@router.post("/{session_id}/phase", operation_id="setPhase", responses=errors(400, 404, 409))
async def set_phase(session: SessionDep, body: PhaseBody, services: ServicesDep) -> PhaseView:
    """Say what the session is doing, and when it will go on. Answers at once; KV moves in the background.

    A turn makes the phase `compute` by itself.
    """
    services.sessions.set_phase(session, body.phase, body.resume_in_ms)
    settings = services.settings
    leaves = KVPolicy(settings.kv_policy) is KVPolicy.SIGNAL and settings.kv_host != KVBudget()
    return PhaseView.of(session, leaves=leaves)

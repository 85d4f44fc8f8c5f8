"""Sessions move from one server of a cluster to another."""

from fastapi import APIRouter

from app.domain.errors import NoCluster
from app.routers.dependencies import AnySessionDep, OperatorOnlyDep, ServicesDep, errors
from app.web.json_body import JsonRoute
from app.wire.moves import MoveBody, MoveView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)


@router.post(
    "/{session_id}/move",
    operation_id="moveSession",
    responses=errors(400, 404, 409, 421, 502, 503),
    dependencies=[OperatorOnlyDep],
)
async def move_session(session: AnySessionDep, body: MoveBody, services: ServicesDep) -> MoveView:
    """Move the session to another server, KV included. Only an operator may. Requests for it get 409 `moving`
    meanwhile, and afterwards 421 `moved` with the header `Djinn-Home`.
    """
    if services.cluster is None:
        raise NoCluster("this server is in no cluster: it was started without --peers")
    gone = await services.cluster.departures.move(session, body.replica)
    return MoveView(
        id=gone.session,
        replica=gone.peer.name,
        url=gone.peer.url,
        tokens=gone.sent.tokens,
        tokens_with_kv=gone.sent.computed_tokens,
        bytes=gone.sent.bytes,
        seconds=gone.seconds,
    )

"""What a session keeps inside the model, as maps over layers and positions. It need not be paused."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange
from app.routers.dependencies import OwnerDep, Services, ServicesDep, SessionDep, errors
from app.web.sse import unless_disconnected
from app.wire.activation_maps import LensMapQuery, LensMapView, NormsQuery, NormsView
from app.wire.tensors import norm

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["breakpoints"])


@router.get("/lens", operation_id="getLensMap", responses=errors(404))
async def get_lens_map(
    request: Request, session: SessionDep, query: Annotated[LensMapQuery, Query()], services: ServicesDep
) -> LensMapView:
    """The logit lens at many layers: what `capture` breakpoints have recorded, and the checkpoint of a paused turn.

    The tokens of all sessions go first. A client that disconnects ends it.
    """
    layers = query.to_layers(services.info.num_layers)
    lens = services.sessions.maps.lens(session, query.to_positions(), layers, query.top_k)
    return LensMapView.of(await unless_disconnected(request, lens), services.tokens)


@router.get("/norms", operation_id="getNorms", responses=errors(404))
async def get_norms(
    request: Request,
    session: SessionDep,
    query: Annotated[NormsQuery, Query()],
    services: ServicesDep,
    owner: OwnerDep,
) -> NormsView:
    """The L2 length of the same residual streams, and the cosine of each to a vector, if one is named."""
    vector = None if query.vector is None else _direction(query.vector, services, owner)
    layers = query.to_layers(services.info.num_layers)
    norms = services.sessions.maps.norms(session, query.to_positions(), layers, vector)
    return NormsView.of(await unless_disconnected(request, norms))


def _direction(name: str, services: Services, owner: str | None) -> TensorData:
    vector = services.vectors.get(owner, name)
    if not norm(vector):
        raise FieldOutOfRange(f"vector: {name} is zero, so nothing has a cosine to it", param="vector")
    return vector

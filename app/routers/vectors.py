"""Named steering vectors that edits refer to."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange
from app.routers.dependencies import OwnerDep, ServicesDep, errors
from app.web.binary import FILE, FILE_BODY, file_response, whole_body
from app.wire.tensors import read_one, write_file
from app.wire.vectors import VectorList, VectorQuery, VectorView

router = APIRouter(prefix="/v1/vectors", tags=["breakpoints"])

VECTOR = "vector"


@router.post("", operation_id="createVector", status_code=201, responses=errors(400, 503), openapi_extra=FILE_BODY)
async def create_vector(
    request: Request, query: Annotated[VectorQuery, Query()], services: ServicesDep, owner: OwnerDep
) -> VectorView:
    """Keep a vector under a name: a safetensors file with one tensor `[hidden_size]`. It takes the place of another one
    of that name; edits that were sent before keep the old one.
    """
    content = await whole_body(request)
    vector = await services.side_work.run(owner, _read_vector, content, services.info.hidden_size)
    await services.vectors.put(owner, query.name, vector)
    return VectorView.of(query.name, vector)


@router.get("", operation_id="listVectors", responses=errors())
async def list_vectors(services: ServicesDep, owner: OwnerDep) -> VectorList:
    """The caller's vectors."""
    found = services.vectors.owned_by(owner)
    return VectorList(data=[VectorView.of(name, vector) for name, vector in found.items()])


@router.get(
    "/{name}", operation_id="getVector", response_class=Response, responses={**errors(404), 200: {"content": FILE}}
)
async def get_vector(request: Request, name: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """A vector as safetensors: one tensor `vector`."""
    return file_response(request, write_file({VECTOR: services.vectors.get(owner, name)}))


@router.delete("/{name}", operation_id="deleteVector", status_code=204, responses=errors(404))
async def delete_vector(name: str, services: ServicesDep, owner: OwnerDep) -> None:
    """Forget a vector. Edits that were sent before keep it."""
    await services.vectors.delete(owner, name)


def _read_vector(content: bytes, hidden_size: int) -> TensorData:
    _, vector, _ = read_one(content, param=VECTOR)
    if vector.shape != (hidden_size,):
        raise FieldOutOfRange(f"shape: it must be [{hidden_size}], not {list(vector.shape)}", param="shape")
    return vector

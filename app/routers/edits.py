"""From the edits that a client sent to those that the engine makes: names of vectors become their numbers."""

from collections.abc import Iterable

from app.domain.breakpoints import Edit, TensorData
from app.domain.errors import FieldOutOfRange
from app.routers.dependencies import Services
from app.wire.edits import DIRECTION_LENGTHS, EditBody, fits
from app.wire.tensors import norm, to_float32, vector_of


def to_edits(bodies: Iterable[EditBody], services: Services, owner: str | None) -> tuple[Edit, ...]:
    """The edits with the numbers of their vectors.

    Raises `NotFound` for a vector that the owner does not have, `FieldOutOfRange` for one that does not fit.
    """
    return tuple(
        Edit(
            op=body.op,
            factor=1.0 if body.factor is None else body.factor,
            vector=_vector(body, services, owner, param=f"edits.{index}.vector"),
            positions=body.to_positions(),
            max_norm=body.max_norm,
        )
        for index, body in enumerate(bodies)
    )


def _vector(body: EditBody, services: Services, owner: str | None, *, param: str) -> TensorData | None:
    if body.vector is None:
        return None
    if isinstance(body.vector, str):
        vector = vector_of(to_float32(services.vectors.get(owner, body.vector)))
    else:
        vector = vector_of(body.vector)
    size, wanted = vector.shape[0], services.info.hidden_size
    if size != wanted:
        raise FieldOutOfRange(f"{param}: it must have {wanted} numbers, not {size}", param=param)
    if not fits(body.op, vector):
        shortest, longest = DIRECTION_LENGTHS
        raise FieldOutOfRange(
            f"{param}: for {body.op} its length must be from {shortest} to {longest}, not {norm(vector)}", param=param
        )
    return vector

# Generated from client/_async by `python client/_generate.py`: make changes there.
"""Steering vectors on the server."""

import numpy.typing as npt

from client import breakpoint_calls as calls
from client.breakpoint_models import VectorInfo
from client.tensors import FloatArray
from client.transport import Transport


class Vectors:
    """The vectors that belong to this API key, which edits refer to by name."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def put(self, name: str, values: npt.ArrayLike) -> VectorInfo:
        """Keep `values`, `[hidden]`, under `name`, in the place of what was there; breakpoints keep what they have."""
        return self._transport.send(calls.put_vector(name, values))

    def list(self) -> tuple[VectorInfo, ...]:
        """What there is, by name."""
        return self._transport.send(calls.list_vectors())

    def get(self, name: str) -> FloatArray:
        """The numbers of a vector. Raises `NotFound`."""
        return self._transport.send(calls.get_vector(name))

    def delete(self, name: str) -> None:
        """Forget a vector. Raises `NotFound`."""
        self._transport.send(calls.delete_vector(name))

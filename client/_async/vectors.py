"""Steering vectors on the server."""

import numpy.typing as npt

from client import breakpoint_calls as calls
from client.breakpoint_models import VectorInfo
from client.tensors import FloatArray
from client.transport import AsyncTransport


class AsyncVectors:
    """The vectors that belong to this API key, which edits refer to by name."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def put(self, name: str, values: npt.ArrayLike) -> VectorInfo:
        """Keep `values`, `[hidden]`, under `name`, in the place of what was there; breakpoints keep what they have."""
        return await self._transport.send(calls.put_vector(name, values))

    async def list(self) -> tuple[VectorInfo, ...]:
        """What there is, by name."""
        return await self._transport.send(calls.list_vectors())

    async def get(self, name: str) -> FloatArray:
        """The numbers of a vector. Raises `NotFound`."""
        return await self._transport.send(calls.get_vector(name))

    async def delete(self, name: str) -> None:
        """Forget a vector. Raises `NotFound`."""
        await self._transport.send(calls.delete_vector(name))

"""Steering vectors on the server."""

from client import breakpoint_calls as calls
from client.breakpoint_models import VectorInfo
from client.calls import UNSET, Seconds
from client.tensors import ArrayLike, FloatArray
from client.transport import AsyncTransport


class AsyncVectors:
    """The vectors that belong to this API key, which edits refer to by name."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    async def put(self, name: str, values: ArrayLike, *, timeout: Seconds = UNSET) -> VectorInfo:
        """Keep `values`, `[hidden]`, under `name`, in the place of what was there; breakpoints keep what they have."""
        return await self._transport.send(calls.put_vector(name, values), timeout)

    async def list(self, *, timeout: Seconds = UNSET) -> tuple[VectorInfo, ...]:
        """What there is, by name."""
        return await self._transport.send(calls.list_vectors(), timeout)

    async def get(self, name: str, *, timeout: Seconds = UNSET) -> FloatArray:
        """The numbers of a vector. Raises `NotFound`."""
        return await self._transport.send(calls.get_vector(name), timeout)

    async def delete(self, name: str, *, timeout: Seconds = UNSET) -> None:
        """Forget a vector. Raises `NotFound`."""
        await self._transport.send(calls.delete_vector(name), timeout)

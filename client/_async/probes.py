"""Probes on the server: classifiers that are read inside the model."""

from pathlib import Path
from typing import Literal

from client import breakpoint_calls as calls
from client.breakpoint_models import ProbeInfo
from client.calls import UNSET, Seconds
from client.transport import AsyncTransport


class AsyncProbes:
    """The probes that belong to this API key, which `session.probe` refers to by name."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    async def put(
        self,
        name: str,
        path: str | Path,
        *,
        layer: int,
        point: str | None = None,
        output: Literal["sigmoid", "none"] | None = None,
        timeout: Seconds = UNSET,
    ) -> ProbeInfo:
        """Keep a probe under `name`, in the place of what was there: `path` is a safetensors file with the tensors of a
        `torch.nn.Linear`, or of a `Sequential` of Linear, ReLU and Linear.

        Raises `Unprocessable`, which names the tensor, if it is not for this model. Raises also `OSError`.
        """
        return await self._transport.upload(calls.put_probe(name, layer, point, output), Path(path), timeout)

    async def list(self, *, timeout: Seconds = UNSET) -> tuple[ProbeInfo, ...]:
        """What there is, by name."""
        return await self._transport.send(calls.list_probes(), timeout)

    async def get(self, name: str, *, timeout: Seconds = UNSET) -> ProbeInfo:
        """What a probe is. Raises `NotFound`."""
        return await self._transport.send(calls.get_probe(name), timeout)

    async def delete(self, name: str, *, timeout: Seconds = UNSET) -> None:
        """Forget a probe. Breakpoints keep it. Raises `NotFound`."""
        await self._transport.send(calls.delete_probe(name), timeout)

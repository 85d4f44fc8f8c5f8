# Generated from client/_async by `python client/_generate.py`: make changes there.
"""Lenses on the server: one matrix for each layer."""

from pathlib import Path

from client import breakpoint_calls as calls
from client.breakpoint_models import LensInfo, LensKind
from client.calls import UNSET, Seconds
from client.transport import Transport


class Lenses:
    """The lenses that belong to this API key, which lens maps refer to by name."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    def put(self, name: str, path: str | Path, *, kind: LensKind, timeout: Seconds = UNSET) -> LensInfo:
        """Keep a lens under `name`, in the place of what was there: `path` is a safetensors file with `0.weight`
        `[hidden, hidden]` and, if there is one, `0.bias` for the stream after layer 0, and so on.

        Raises `Unprocessable`, which names the tensor, if it is not for this model. Raises also `OSError`.
        """
        return self._transport.upload(calls.put_lens(name, kind), Path(path), timeout)

    def list(self, *, timeout: Seconds = UNSET) -> tuple[LensInfo, ...]:
        """What there is, by name."""
        return self._transport.send(calls.list_lenses(), timeout)

    def get(self, name: str, *, timeout: Seconds = UNSET) -> LensInfo:
        """What a lens is. Raises `NotFound`."""
        return self._transport.send(calls.get_lens(name), timeout)

    def delete(self, name: str, *, timeout: Seconds = UNSET) -> None:
        """Forget a lens. Raises `NotFound`."""
        self._transport.send(calls.delete_lens(name), timeout)

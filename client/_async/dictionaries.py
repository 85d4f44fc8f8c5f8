"""Dictionaries on the server: sparse autoencoders and transcoders."""

from pathlib import Path

from client import breakpoint_calls as calls
from client.breakpoint_models import DictionaryInfo
from client.calls import UNSET, Seconds
from client.files import dictionary_files
from client.transport import AsyncTransport


class AsyncDictionaries:
    """The dictionaries that belong to this API key, which reads and edits refer to by name."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    async def put(
        self,
        name: str,
        path: str | Path,
        *,
        layer: int | None = None,
        point: str | None = None,
        neuronpedia_id: str | None = None,
        timeout: Seconds = UNSET,
    ) -> DictionaryInfo:
        """Keep a dictionary under `name`, in the place of what was there: `path` is a folder of SAELens, or a file such
        as Gemma Scope's `params.npz`, for which `layer` says where it belongs.

        Raises `Unprocessable`, which names the field, if it is not for this model. Raises also `OSError`.
        """
        config, weights = dictionary_files(Path(path))
        fields = {"layer": layer, "point": point, "neuronpedia_id": neuronpedia_id}
        return await self._transport.upload(calls.put_dictionary(name, config, fields), weights, timeout)

    async def list(self, *, timeout: Seconds = UNSET) -> tuple[DictionaryInfo, ...]:
        """What there is, by name."""
        return await self._transport.send(calls.list_dictionaries(), timeout)

    async def get(self, name: str, *, timeout: Seconds = UNSET) -> DictionaryInfo:
        """What a dictionary is. Raises `NotFound`."""
        return await self._transport.send(calls.get_dictionary(name), timeout)

    async def delete(self, name: str, *, timeout: Seconds = UNSET) -> None:
        """Forget a dictionary. Raises `NotFound`."""
        await self._transport.send(calls.delete_dictionary(name), timeout)

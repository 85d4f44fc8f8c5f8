# Generated from client/_async by `python client/_generate.py`: make changes there.
"""What reads the inside of the model by name on the server: dictionaries, lenses and probes."""

from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from client import breakpoint_calls as calls
from client.answer import Answer
from client.breakpoint_models import DictionaryInfo, LensInfo, LensKind, ProbeInfo
from client.calls import UNSET, Seconds
from client.files import dictionary_files
from client.transport import Transport

Info = TypeVar("Info", bound=Answer)


class Uploads(Generic[Info]):
    """What belongs to this API key of one kind, by name."""

    _path: ClassVar[str]
    _info: type[Info]

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    def list(self, *, timeout: Seconds = UNSET) -> tuple[Info, ...]:
        """What there is, by name."""
        return self._transport.send(calls.list_uploads(self._path, self._info), timeout)

    def get(self, name: str, *, timeout: Seconds = UNSET) -> Info:
        """What one is, without its numbers. Raises `NotFound`."""
        return self._transport.send(calls.get_upload(self._path, name, self._info), timeout)

    def delete(self, name: str, *, timeout: Seconds = UNSET) -> None:
        """Forget one. What was armed with it keeps what it needs. Raises `NotFound`."""
        self._transport.send(calls.delete_upload(self._path, name), timeout)


class Dictionaries(Uploads[DictionaryInfo]):
    """Sparse autoencoders and transcoders, which reads and edits refer to by name."""

    _path, _info = calls.DICTIONARIES, DictionaryInfo

    def put(
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
        return self._transport.upload(calls.put_dictionary(name, config, fields), weights, timeout)


class Lenses(Uploads[LensInfo]):
    """Lenses, one matrix for each layer, which lens maps refer to by name."""

    _path, _info = calls.LENSES, LensInfo

    def put(self, name: str, path: str | Path, *, kind: LensKind, timeout: Seconds = UNSET) -> LensInfo:
        """Keep a lens under `name`, in the place of what was there: `path` is a safetensors file with `0.weight`
        `[hidden, hidden]` and, if there is one, `0.bias` for the stream after layer 0, and so on.

        Raises `Unprocessable`, which names the tensor, if it is not for this model. Raises also `OSError`.
        """
        return self._transport.upload(calls.put_lens(name, kind), Path(path), timeout)


class Probes(Uploads[ProbeInfo]):
    """Classifiers that are read inside the model, which `session.probe` refers to by name."""

    _path, _info = calls.PROBES, ProbeInfo

    def put(
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
        return self._transport.upload(calls.put_probe(name, layer, point, output), Path(path), timeout)

"""The routes of breakpoints, checkpoints and vectors. Nothing here does I/O."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from client.answer import Answer, Listing
from client.breakpoint_models import (
    Attribution,
    BreakpointInfo,
    CheckpointInfo,
    DictionaryInfo,
    Dtype,
    Features,
    Lens,
    LensInfo,
    LensKind,
    LensMap,
    Norms,
    PointInfo,
    Positions,
    ProbeInfo,
    VectorInfo,
)
from client.calls import Call, nothing, path_part, session_path
from client.captures import Captures, parse_captures
from client.edits import EditOptions, Until, edit_body, until_body
from client.models import Turn
from client.tensors import ArrayLike, FloatArray, dump, load

ACTIVATION = "activation"
DICTIONARIES, LENSES, PROBES = "/v1/dictionaries", "/v1/lenses", "/v1/probes"

A = TypeVar("A", bound=Answer)


def arm(session: str, body: Mapping[str, Any]) -> Call[BreakpointInfo]:
    """`POST /v1/sessions/{id}/breakpoints`."""
    return Call("POST", session_path(session, "breakpoints"), BreakpointInfo.model_validate_json, json=body)


def list_breakpoints(session: str) -> Call[tuple[BreakpointInfo, ...]]:
    """`GET /v1/sessions/{id}/breakpoints`."""
    path = session_path(session, "breakpoints")
    return Call("GET", path, lambda body: Listing[BreakpointInfo].model_validate_json(body).data)


def remove_breakpoint(session: str, breakpoint: str) -> Call[None]:
    """`DELETE /v1/sessions/{id}/breakpoints/{bid}`."""
    return Call("DELETE", session_path(session, f"breakpoints/{path_part(breakpoint)}"), nothing)


def clear_breakpoints(session: str) -> Call[None]:
    """`DELETE /v1/sessions/{id}/breakpoints`."""
    return Call("DELETE", session_path(session, "breakpoints"), nothing)


def get_checkpoint(session: str) -> Call[CheckpointInfo]:
    """`GET /v1/sessions/{id}/checkpoint`."""
    return Call("GET", session_path(session, "checkpoint"), CheckpointInfo.model_validate_json)


def read_activation(session: str, positions: Positions) -> Call[FloatArray]:
    """`GET /v1/sessions/{id}/checkpoint/activation`."""
    path, params = session_path(session, "checkpoint/activation"), {"positions": _text(positions)}
    return Call("GET", path, lambda body: _only(body, ACTIVATION), params=params)


def write_activation(session: str, values: ArrayLike, dtype: Dtype) -> Call[CheckpointInfo]:
    """`PUT /v1/sessions/{id}/checkpoint/activation`. Raises `InvalidRequest` for values that are not numbers."""
    path, tensor = session_path(session, "checkpoint/activation"), dump(ACTIVATION, values, dtype)
    return Call("PUT", path, CheckpointInfo.model_validate_json, tensor=tensor)


def edit_checkpoint(session: str, edits: Sequence[Mapping[str, Any]]) -> Call[CheckpointInfo]:
    """`POST /v1/sessions/{id}/checkpoint/edit`. Raises `InvalidRequest` for an edit that is none."""
    path, body = session_path(session, "checkpoint/edit"), {"edits": [edit_body(edit) for edit in edits]}
    return Call("POST", path, CheckpointInfo.model_validate_json, json=body)


def read_lens(session: str, top_k: int, positions: Positions) -> Call[Lens]:
    """`GET /v1/sessions/{id}/checkpoint/lens`."""
    path = session_path(session, "checkpoint/lens")
    return Call("GET", path, Lens.model_validate_json, params={"top_k": top_k, "positions": _text(positions)})


def read_lens_map(
    session: str,
    positions: Positions,
    layers: Sequence[int] | None,
    top_k: int,
    lens: str | None,
    tokens: Sequence[int] | None,
    *,
    measures: bool,
    beside: str | None,
) -> Call[LensMap]:
    """`GET /v1/sessions/{id}/lens`."""
    params = _map_params(positions, layers) | {"top_k": top_k}
    params |= {} if lens is None else {"lens": lens}
    params |= {"tokens": ",".join(map(str, tokens))} if tokens else {}
    params |= {"measures": "true"} if measures else {}
    params |= {} if beside is None else {"beside": beside}
    return Call("GET", session_path(session, "lens"), LensMap.model_validate_json, params=params)


def read_norms(session: str, positions: Positions, layers: Sequence[int] | None, vector: str | None) -> Call[Norms]:
    """`GET /v1/sessions/{id}/norms`."""
    params = _map_params(positions, layers) | ({} if vector is None else {"vector": vector})
    return Call("GET", session_path(session, "norms"), Norms.model_validate_json, params=params)


def read_captures(session: str, point: str | None, layer: int | None) -> Call[Captures]:
    """`GET /v1/sessions/{id}/captures`."""
    params = {name: value for name, value in (("point", point), ("layer", layer)) if value is not None}
    return Call("GET", session_path(session, "captures"), parse_captures, params=params)


def clear_captures(session: str) -> Call[None]:
    """`DELETE /v1/sessions/{id}/captures`."""
    return Call("DELETE", session_path(session, "captures"), nothing)


def resume(session: str, until: Until | None, edits: Sequence[EditOptions], *, stream: bool) -> Call[Turn]:
    """`POST /v1/sessions/{id}/resume`. A streamed answer is for `TurnDecoder`, not for `parse`."""
    body = until_body(until) | {"stream": stream}
    if edits:
        body["edits"] = [edit_body(edit) for edit in edits]
    return Call("POST", session_path(session, "resume"), Turn.model_validate_json, json=body)


def list_points() -> Call[tuple[PointInfo, ...]]:
    """`GET /v1/points`."""
    return Call("GET", "/v1/points", lambda body: Listing[PointInfo].model_validate_json(body).data)


def put_vector(name: str, values: ArrayLike) -> Call[VectorInfo]:
    """`POST /v1/vectors`, in float16 if the values are, else in float32."""
    dtype = "float16" if str(getattr(values, "dtype", "")) == "float16" else "float32"
    tensor = dump("vector", values, dtype)
    return Call("POST", "/v1/vectors", VectorInfo.model_validate_json, params={"name": name}, tensor=tensor)


def list_vectors() -> Call[tuple[VectorInfo, ...]]:
    """`GET /v1/vectors`."""
    return Call("GET", "/v1/vectors", lambda body: Listing[VectorInfo].model_validate_json(body).data)


def get_vector(name: str) -> Call[FloatArray]:
    """`GET /v1/vectors/{name}`."""
    return Call("GET", f"/v1/vectors/{path_part(name)}", lambda body: _only(body))


def delete_vector(name: str) -> Call[None]:
    """`DELETE /v1/vectors/{name}`."""
    return Call("DELETE", f"/v1/vectors/{path_part(name)}", nothing)


def put_dictionary(name: str, config: bytes | None, fields: Mapping[str, str | int | None]) -> Call[DictionaryInfo]:
    """`POST /v1/dictionaries`; the weights come as a file."""
    form: dict[str, str | bytes] = {"name": name}
    form |= {field: str(value) for field, value in fields.items() if value is not None}
    if config is not None:
        form["cfg"] = config
    return Call("POST", DICTIONARIES, DictionaryInfo.model_validate_json, form=form)


def put_lens(name: str, kind: LensKind) -> Call[LensInfo]:
    """`POST /v1/lenses`; the weights come as a file."""
    return Call("POST", LENSES, LensInfo.model_validate_json, form={"name": name, "kind": kind})


def put_probe(name: str, layer: int, point: str | None, output: str | None) -> Call[ProbeInfo]:
    """`POST /v1/probes`; the weights come as a file."""
    given = {} if point is None else {"point": point}
    given |= {} if output is None else {"output": output}
    form = {"name": name, "layer": str(layer), **given}
    return Call("POST", PROBES, ProbeInfo.model_validate_json, form=form)


def list_uploads(path: str, info: type[A]) -> Call[tuple[A, ...]]:
    """`GET` of `DICTIONARIES`, `LENSES` or `PROBES`."""
    return Call("GET", path, lambda body: Listing[info].model_validate_json(body).data)  # type: ignore[valid-type]


def get_upload(path: str, name: str, info: type[A]) -> Call[A]:
    """`GET` of one of them."""
    return Call("GET", f"{path}/{path_part(name)}", info.model_validate_json)


def delete_upload(path: str, name: str) -> Call[None]:
    """`DELETE` of one of them."""
    return Call("DELETE", f"{path}/{path_part(name)}", nothing)


def read_attribution(session: str, tokens: tuple[int, int], positions: Positions, neurons: int) -> Call[Attribution]:
    """`GET /v1/sessions/{id}/attribution`."""
    params: dict[str, Any] = {"tokens": f"{tokens[0]},{tokens[1]}", "positions": _text(positions), "neurons": neurons}
    return Call("GET", session_path(session, "attribution"), Attribution.model_validate_json, params=params)


def read_features(
    session: str, dictionary: str, positions: Positions, top_k: int, features: Sequence[int] | None
) -> Call[Features]:
    """`GET /v1/sessions/{id}/features`."""
    params: dict[str, str | int] = {"dictionary": dictionary, "positions": _text(positions), "top_k": top_k}
    if features is not None:
        params["features"] = ",".join(map(str, features))
    return Call("GET", session_path(session, "features"), Features.model_validate_json, params=params)


def _only(body: bytes, name: str | None = None) -> FloatArray:
    """The only tensor of a file, which must have the name."""
    tensors, _ = load(body)
    if len(tensors) != 1 or name not in (None, *tensors):
        raise ValueError(f"tensors {', '.join(tensors) or 'none'} instead of one {name or ''}".rstrip())
    (array,) = tensors.values()
    return array


def _map_params(positions: Positions, layers: Sequence[int] | None) -> dict[str, str | int]:
    chosen = {} if layers is None else {"layers": ",".join(map(str, layers))}
    return {"positions": _text(positions), **chosen}


def _text(positions: Positions) -> str:
    return positions if isinstance(positions, str) else f"{positions[0]}:{positions[1]}"

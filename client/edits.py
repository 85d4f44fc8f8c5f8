"""Changes inside the model and where they are made, in the words of Python and in those of the wire."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict, get_args

from client.breakpoint_models import Op, Positions
from client.errors import InvalidRequest
from client.tensors import Numbers

Vector = str | Sequence[float] | Numbers
"""The name of a vector on the server, or as many numbers as the point is wide."""

Until = Literal["next_token", "end"] | int | tuple[int, str]
"""How far to resume: to the same place in the pass of the next token, to the end of the turn, to after a layer of this
pass, or to a point of that layer.
"""


class Kept(TypedDict, total=False):
    """What a session keeps of a point, by its captures or its pause. Absent: the point and the layer of the edit."""

    session: Required[str]
    point: str
    layer: int
    positions: Positions


class Feature(TypedDict):
    """A feature of an uploaded dictionary."""

    dictionary: str
    index: int


class Where(TypedDict, total=False):
    """Positions where something is done: the scalar product with `along`, the activation of a `feature`, or what the
    `probe` of that name finds is above a number, below one, or both.
    """

    along: Vector
    feature: Feature
    probe: str
    above: float
    below: float


class EditOptions(TypedDict, total=False):
    """One change of what stands at a point, `h`, at each position; `u` is the vector at length 1. Give exactly one of

    - `scale`: `scale * h`
    - `add`: `h + factor * vector`; `factor` is 1 unless given
    - `replace`: the vector
    - `project_out`: `h - (h . u) u`
    - `clamp`: `h + (factor - h . u) u`; needs `factor`
    - `ablate=True`: 0; `ablate=vector`: the vector, such as a mean

    `source` gives what another session keeps: `replace=True` and `add=True` take it position by position, `ablate=True`
    its mean. `orthogonal_to` leaves out the vector's part along another one.

    `feature` is of a dictionary: `add=True` takes its decoder; `scale`, `clamp=True` with a `factor`, and `ablate=True`
    change its activation, and `h` by what its decoder makes of that.

    `heads`, `neurons` or `experts` limit it to these; each head is one `h`. `positions` limits it to some positions,
    `where` to those where a condition holds. `max_norm` shortens the change, at each position, to that L2 length;
    `keep_norm` gives what comes out the length of `h`.
    """

    scale: float
    add: Vector | Literal[True]
    replace: Vector | Literal[True]
    project_out: Vector
    clamp: Vector | Literal[True]
    ablate: Vector | Literal[True]
    factor: float
    source: Kept
    feature: Feature
    orthogonal_to: Vector
    heads: Sequence[int]
    neurons: Sequence[int]
    experts: Sequence[int]
    positions: Positions
    keep_norm: bool
    max_norm: float
    where: Where


OPS: tuple[Op, ...] = get_args(Op)
CONDITIONS = {"when_pass": "pass", "position": "position", "token_id": "token_id", "every": "every"}
"""Our names of a breakpoint's conditions, and the wire's."""
WIRE = {"source": "from", "where": "when"}
"""The same for the fields of an edit."""


def edit_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """One edit as it is sent. Raises `InvalidRequest` unless exactly one operation is named."""
    named = [op for op in OPS if op in options]
    if len(named) != 1:
        raise InvalidRequest(f"an edit names exactly one of {', '.join(OPS)}, not {' and '.join(named) or 'none'}")
    (op,) = named
    if op == "scale" and "factor" in options:
        raise InvalidRequest("the factor of scale is its value: there is no other")
    vector, other = options[op], next((name for name in ("source", "feature") if name in options), None)
    if vector is False or (vector is True and op != "ablate" and other is None):
        raise InvalidRequest(f"{op} takes a vector, or True with a source or a feature")
    if other is not None and vector is not True and (op, other) != ("scale", "feature"):
        raise InvalidRequest(f"{op} must be True with a {other}, which takes the place of a vector")
    body = {"op": op} | {WIRE.get(name, name): _sent(name, value) for name, value in options.items() if name not in OPS}
    if op == "scale":
        return body | {"factor": vector}
    return body if vector is True else body | {"vector": _vector(vector)}


def pause_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """A breakpoint that pauses, as it is sent."""
    return {"action": "pause", **_place(options)}


def probe_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """A breakpoint that reads a probe, as it is sent."""
    probe = {name: options[name] for name in ("name", "above", "then") if name in options}
    place = {name: value for name, value in options.items() if name not in probe}
    return {"action": "probe", "probe": probe, **_place(place)}


def features_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """A breakpoint that tells features, as it is sent."""
    asked = {name: options[name] for name in ("dictionary", "top_k") if name in options}
    place = {name: value for name, value in options.items() if name not in asked}
    return {"action": "features", "features": asked, **_place(place)}


def capture_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """A breakpoint that records, as it is sent."""
    return {"action": "capture", **_place(options)}


def steer_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """A breakpoint that edits, as it is sent. Raises `InvalidRequest` like `edit_body`."""
    edit = {name: value for name, value in options.items() if name in EditOptions.__annotations__}
    place = {name: value for name, value in options.items() if name not in edit}
    return {"action": "edit", **_place(place), "edits": [edit_body(edit)]}


def until_body(until: Until | None) -> dict[str, Any]:
    """How far to resume, as it is sent; None goes to the next breakpoint."""
    if until is None:
        return {}
    if isinstance(until, tuple):
        return {"until": {"layer": until[0], "point": until[1]}}
    return {"until": {"layer": until} if isinstance(until, int) else until}


def _place(options: Mapping[str, Any]) -> dict[str, Any]:
    when = {wire: options[name] for name, wire in CONDITIONS.items() if name in options}
    when |= _sent("where", options.get("where", {}))
    body = {"when": when} | {name: value for name, value in options.items() if name not in (*CONDITIONS, "where")}
    return body | {name: list(options[name]) for name in ("layers", "heads") if name in options}


def _sent(name: str, value: Any) -> Any:
    if name == "orthogonal_to":
        return _vector(value)
    if name == "where":
        return {**value, "along": _vector(value["along"])} if "along" in value else value
    return list(value) if name in ("heads", "neurons", "experts") else value


def _vector(vector: Vector) -> str | list[float]:
    if isinstance(vector, str):
        return vector
    try:
        return vector.tolist() if hasattr(vector, "tolist") else [float(number) for number in vector]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a vector is a name or an array of real numbers: {error}") from error

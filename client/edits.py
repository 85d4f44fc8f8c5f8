"""Changes of the residual stream and where they are made, in the words of Python and in those of the wire."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

from client.breakpoint_models import Op, Positions
from client.errors import InvalidRequest
from client.tensors import Numbers

Vector = str | Sequence[float] | Numbers
"""The name of a vector on the server, or `[hidden]` numbers."""

Until = Literal["next_token", "end"] | int
"""How far to resume: to the same layer of the next token, to the end of the turn, or to after a layer of this pass."""


class EditOptions(TypedDict, total=False):
    """One change of the residual stream `h` at each position; `u` is the vector at length 1. Give exactly one of

    - `scale`: `scale * h`
    - `add`: `h + factor * vector`; `factor` is 1 unless given
    - `replace`: the vector
    - `project_out`: `h - (h . u) u`
    - `clamp`: `h + (factor - h . u) u`; needs `factor`
    - `ablate=True`: 0

    `positions` limits it to some positions. `max_norm` shortens the change, at each position, to that L2 length.
    """

    scale: float
    add: Vector
    replace: Vector
    project_out: Vector
    clamp: Vector
    ablate: Literal[True]
    factor: float
    positions: Positions
    max_norm: float


OPS: tuple[Op, ...] = get_args(Op)
CONDITIONS = {"when_pass": "pass", "position": "position", "token_id": "token_id", "every": "every"}
"""Our names of a breakpoint's conditions, and the wire's."""


def edit_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """One edit as it is sent. Raises `InvalidRequest` unless exactly one operation is named."""
    named = [op for op in OPS if op in options]
    if len(named) != 1:
        raise InvalidRequest(f"an edit names exactly one of {', '.join(OPS)}, not {' and '.join(named) or 'none'}")
    (op,) = named
    if op == "scale" and "factor" in options:
        raise InvalidRequest("the factor of scale is its value: there is no other")
    if op == "ablate" and options["ablate"] is not True:
        raise InvalidRequest("ablate must be True: without it nothing is ablated")
    body = {"op": op} | {name: value for name, value in options.items() if name not in OPS}
    if op == "scale":
        return body | {"factor": options["scale"]}
    return body if op == "ablate" else body | {"vector": _vector(options[op])}


def pause_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """A breakpoint that pauses, as it is sent."""
    return {"action": "pause", **_place(options)}


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
    return {"until": {"layer": until} if isinstance(until, int) else until}


def _place(options: Mapping[str, Any]) -> dict[str, Any]:
    when = {wire: options[name] for name, wire in CONDITIONS.items() if name in options}
    body = {"when": when} | {name: value for name, value in options.items() if name not in CONDITIONS}
    return body | {"layers": list(options["layers"])} if "layers" in options else body


def _vector(vector: Vector) -> str | list[float]:
    if isinstance(vector, str):
        return vector
    try:
        return vector.tolist() if hasattr(vector, "tolist") else [float(number) for number in vector]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a vector is a name or an array of real numbers: {error}") from error

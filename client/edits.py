"""Changes of the residual stream and where they are made, in the words of Python and in those of the wire."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast, get_args

import numpy as np
import numpy.typing as npt

from client.breakpoint_models import OnTimeout, Op, Pass, Positions
from client.errors import InvalidRequest

Vector = str | Sequence[float] | npt.NDArray[Any]
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


class WhenOptions(TypedDict, total=False):
    """After which layer, or `layers`, and at which positions of the history; all conditions given must hold.

    `when_pass` is `prefill` (over a turn's new context), `decode` (over one generated token) or `any`, the default.
    `position` is one position, `token_id` the token that stands there, and `every` n takes positions that n divides.
    With `once` the breakpoint is gone after the first time.
    """

    layer: int
    layers: Sequence[int]
    when_pass: Pass
    position: int
    token_id: int
    every: int
    once: bool


class PauseOptions(WhenOptions, total=False):
    """Where to pause; after `timeout_s` seconds (600) the server goes on (`resume`, the default) or ends the turn
    (`abort`).
    """

    timeout_s: float
    on_timeout: OnTimeout


class SteerOptions(WhenOptions, EditOptions, total=False):
    """Where to change, and what."""


OPS: tuple[Op, ...] = get_args(Op)
CONDITIONS = {"when_pass": "pass", "position": "position", "token_id": "token_id", "every": "every"}
"""Our names of a breakpoint's conditions, and the wire's."""


def edit_body(options: EditOptions) -> dict[str, Any]:
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


def pause_body(options: PauseOptions) -> dict[str, Any]:
    """A breakpoint that pauses, as it is sent."""
    return {"action": "pause", **_place(options)}


def capture_body(options: WhenOptions) -> dict[str, Any]:
    """A breakpoint that records, as it is sent."""
    return {"action": "capture", **_place(options)}


def steer_body(options: SteerOptions) -> dict[str, Any]:
    """A breakpoint that edits, as it is sent. Raises `InvalidRequest` like `edit_body`."""
    edit = {name: value for name, value in options.items() if name in EditOptions.__annotations__}
    place = {name: value for name, value in options.items() if name not in edit}
    return {"action": "edit", **_place(place), "edits": [edit_body(cast("EditOptions", edit))]}


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
        numbers: list[float] = np.asarray(vector, dtype=np.float64).tolist()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a vector is a name or an array of real numbers: {error}") from error
    return numbers

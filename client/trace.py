"""A trace: what is saved and changed inside the model in one turn, said before it runs. Nothing here does I/O.

    with session.trace(prompt="When John and Mary went to the shop, John gave a bottle to") as trace:
        trace["z", 23].edit(ablate=True, heads=[3])
        streams = [trace["resid_post", layer].save() for layer in range(30)]
        logits = trace["logits"].save()
    print(logits.value[-1].argmax())

The block only notes what is wanted. At its end each `save` becomes a breakpoint that captures and each `edit` one that
edits, the turn runs once, and the breakpoints are removed. So nothing has a value inside the block, and no code runs on
the server: what depends on a value needs a pause, `break_at`, or a second trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from client.breakpoint_models import Pass
from client.calls import given
from client.captures import Capture, Captures
from client.edits import EditOptions, Where, capture_body, steer_body
from client.errors import InvalidRequest
from client.models import Turn
from client.pictures import patterns, svg
from client.tensors import FloatArray, Numbers, joined


class Saved:
    """What stood at a point in the turn of a trace. It is there once the block is over, and an array to NumPy."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._records: Sequence[Capture] | None = None
        self._dropped = 0

    def __repr__(self) -> str:
        shown = "not run yet" if self._records is None else f"{len(self.positions)} positions"
        return f"{type(self).__name__}({self._place}, {shown})"

    @property
    def value(self) -> FloatArray:
        """`[positions, width]`, where there are heads `[positions, heads, head_dim]`, of a pattern `[positions, heads,
        keys]` with zeros behind the keys that a position had. In float32 or float16.

        Raises `InvalidRequest` inside the block, where nothing was computed at the point, and where the server had no
        room for all of it.
        """
        records = self._found()
        if not records:
            raise InvalidRequest(f"{self._place}: the turn computed no position for which the conditions hold")
        return joined([record.activation for record in records])

    @property
    def positions(self) -> tuple[int, ...]:
        """Those of the history that the rows of `value` are for."""
        return tuple(position for record in self._found() for position in record.positions)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What stands at these."""
        return tuple(token for record in self._found() for token in record.token_ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Numbers:
        """For NumPy: `value`."""
        return self.value if dtype is None else self.value.astype(dtype)

    def _repr_svg_(self) -> str | None:
        """A pattern has a picture."""
        if not self._records or self._dropped or self._records[0].point != "pattern":
            return None
        heads = self._records[0].heads or range(self._records[0].activation.shape[1])
        return svg(
            [patterns(f"{self._place}, positions {self.positions[0]} to {self.positions[-1]}", heads, self.value)]
        )

    def fill(self, records: Sequence[Capture], dropped: int) -> None:
        """Take what the server recorded; `dropped` of the session's captures had no room."""
        self._records, self._dropped = records, dropped

    def _found(self) -> Sequence[Capture]:
        if self._records is None:
            raise InvalidRequest(f"{self._place} has a value once the block of the trace is over")
        if self._dropped:
            raise InvalidRequest(
                f"{self._place}: the server had no room for {self._dropped} captures of the session: save fewer points "
                "or positions, after `clear_captures()`"
            )
        return self._records


class TracePoint:
    """A point of the turn. The conditions of both methods are those of `break_at`."""

    def __init__(self, trace: Trace, place: dict[str, Any]) -> None:
        self._trace = trace
        self._place = place

    def save(
        self,
        *,
        heads: Sequence[int] | None = None,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        where: Where | None = None,
    ) -> Saved:
        """Keep what stands here, of `heads` only these. Edits that the trace was told of before are made already."""
        body = capture_body(self._place | given(locals()))
        saved = Saved(".".join(map(str, self._place.values())))
        self._trace.note(body, saved)
        return saved

    def edit(
        self,
        *,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        **edit: Unpack[EditOptions],
    ) -> None:
        """Change what stands here: `edit(scale=0.9)`, `edit(ablate=True, heads=[3])`, as in `EditOptions`."""
        options = given({"when_pass": when_pass, "position": position, "token_id": token_id, "every": every})
        self._trace.note(steer_body(self._place | options | edit), None)


class Trace:
    """What `session.trace` gives: `trace["z", 5]` is a point of a layer, `trace["logits"]` one that is in no layer, and
    `trace["blocks.5.attn.hook_z"]` has TransformerLens's name. `turn` is the turn, once the block is over.
    """

    def __init__(self) -> None:
        self.planned: list[tuple[dict[str, Any], Saved | None]] = []
        self._turn: Turn | None = None

    def __repr__(self) -> str:
        saves = sum(saved is not None for _, saved in self.planned)
        return f"{type(self).__name__}({saves} saved, {len(self.planned) - saves} edits)"

    def __getitem__(self, place: str | tuple[str, int]) -> TracePoint:
        if isinstance(place, str):
            return TracePoint(self, {"point": place})
        point, layer = place
        return TracePoint(self, {"point": point, "layer": layer})

    @property
    def turn(self) -> Turn:
        """What the turn answered. Raises `InvalidRequest` inside the block."""
        if self._turn is None:
            raise InvalidRequest("a trace has a turn once its block is over")
        return self._turn

    def note(self, body: dict[str, Any], saved: Saved | None) -> None:
        """Plan a breakpoint. Raises `InvalidRequest` if the turn has run."""
        if self._turn is not None:
            raise InvalidRequest("the turn of this trace has run: begin another trace")
        self.planned.append((body, saved))

    def finish(self, turn: Turn, armed: Sequence[str], captures: Captures) -> bool:
        """Take what the turn gave, whose breakpoints were `armed`; tells whether all captures are of the trace."""
        self._turn = turn
        for breakpoint, (_, saved) in zip(armed, self.planned, strict=True):
            if saved is not None:
                saved.fill([each for each in captures.records if each.breakpoint == breakpoint], captures.dropped)
        return bool(captures.records) and all(record.breakpoint in armed for record in captures.records)

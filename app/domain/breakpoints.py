"""Breakpoints and edits as data: what clients ask for. No third-party imports.

Boundary k is the point between layer k-1 and layer k. A breakpoint at layer 6 stops at boundary 7: after layer 6's
output, the residual stream that Transformers calls `hidden_states[7]`.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class Pass(StrEnum):
    """Which forward passes: over a turn's context, over one generated token, or either."""

    PREFILL = "prefill"
    DECODE = "decode"
    ANY = "any"


class Action(StrEnum):
    """What a breakpoint does when it is reached."""

    PAUSE = "pause"
    """The session stops there until it is resumed."""
    CAPTURE = "capture"
    """The residual stream is recorded, and the pass goes on."""
    EDIT = "edit"
    """The edits are applied, and the pass goes on."""


class OnTimeout(StrEnum):
    """What becomes of a pause that nobody ends."""

    RESUME = "resume"
    ABORT = "abort"


class EditOp(StrEnum):
    """A change of the residual stream `h` at one position; `v` is the vector, `u` the vector at length 1."""

    SCALE = "scale"
    """`factor * h`"""
    ADD = "add"
    """`h + factor * v`"""
    REPLACE = "replace"
    """`v`"""
    PROJECT_OUT = "project_out"
    """`h - (h . u) u`"""
    CLAMP = "clamp"
    """`h + (factor - h . u) u`: its component along `v` becomes `factor`"""
    ABLATE = "ablate"
    """0"""


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor as bytes, row by row, little endian. `dtype` is PyTorch's name: float32, bfloat16 or float16."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of a session's history: `first` to before `end` (None: to the end), or only the `last` of the context
    that a pass completes. A decoded token is always the last.
    """

    first: int = 0
    end: int | None = None
    last: bool = False


ALL, LAST = Positions(), Positions(last=True)


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the residual stream at some positions.

    `vector` is float32 `[hidden]`, or in a written checkpoint the model's dtype and `[positions, hidden]`. The change
    is shortened to the length `max_norm` (L2, at each position) where it is longer.
    """

    op: EditOp
    factor: float = 1.0
    vector: TensorData | None = None
    positions: Positions = ALL
    max_norm: float | None = None

    def digest(self) -> bytes:
        """16 bytes that differ for edits that do something else; `positions` is left out."""
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.op.value, self.factor, self.max_norm)).encode())
        if self.vector is not None:
            state.update(repr((self.vector.dtype, self.vector.shape)).encode() + self.vector.data)
        return state.digest()


@dataclass(frozen=True, slots=True)
class When:
    """Which positions a breakpoint is for; conditions that are None hold everywhere.

    `every` n holds at positions that n divides, `token_id` where this token stands.
    """

    in_pass: Pass = Pass.ANY
    position: int | None = None
    token_id: int | None = None
    every: int | None = None


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Something to do after each of `layers`, in passes with a position that `when` holds for.

    `pause` stops the whole pass; `capture` and `edit` take only those positions. `once`: it goes after the first time.
    """

    id: str
    layers: tuple[int, ...]
    action: Action
    when: When = When()
    edits: tuple[Edit, ...] = ()
    once: bool = False
    timeout_s: float = 600.0
    on_timeout: OnTimeout = OnTimeout.RESUME


@dataclass(frozen=True, slots=True)
class Intervention:
    """An edit that the KV of positions `[first, end)` was computed with, at a boundary. Its own `positions` no longer
    matter; a vector with a row for each position starts with that of `first`.
    """

    first: int
    end: int
    boundary: int
    edit: Edit


MAX_INTERVENTIONS = 16_384
"""That one session may have, whoever made them: the engine looks through all of them for each block of KV, and each has
to be made again if the KV is lost. At this number that takes it a few milliseconds.
"""
MAX_INTERVENTION_BYTES = 64 << 20
"""Of the tensors of one session's interventions, each counted once: they are kept in memory and in the journal."""


@dataclass(frozen=True, slots=True)
class Until:
    """How far to resume: to the next breakpoint, past all of them with `end`, to after `layer` of this pass, or with
    `next_token` to the same layer in the pass of the next token.
    """

    layer: int | None = None
    next_token: bool = False
    end: bool = False


NEXT_BREAKPOINT = Until()

"""Breakpoints and edits as data: what clients ask for. No third-party imports.

Boundary k is between layer k-1 and layer k. All points of layer 6 belong to boundary 7; unless it says otherwise, a
breakpoint there is after the layer's output, the residual stream that Transformers calls `hidden_states[7]`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from app.domain.errors import FieldOutOfRange
from app.domain.points import Place, Point, place_of
from app.domain.positions import Run, Runs, clip_runs


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
    """What stands at the point is recorded, and the pass goes on."""
    EDIT = "edit"
    """The edits are applied, and the pass goes on."""
    PROBE = "probe"
    """A probe is read at each position. The pass goes on, unless what it finds stops or pauses the turn."""
    FEATURES = "features"
    """The most active features of a dictionary are told of each position, and the pass goes on."""


class OnTimeout(StrEnum):
    """What happens to a pause that no client ends."""

    RESUME = "resume"
    ABORT = "abort"


class EditOp(StrEnum):
    """A change of what stands at one position, `h`; `v` is the vector, `u` the vector at length 1."""

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
    """0, or `v` if there is one: a mean"""


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor as bytes, row by row, little endian. `dtype` is PyTorch's name: float32, bfloat16 or float16."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def rows(self, first: int, end: int) -> TensorData:
        """Rows `[first, end)`."""
        count, *rest = self.shape
        row_bytes = len(self.data) // count
        return TensorData(self.dtype, (end - first, *rest), self.data[first * row_bytes : end * row_bytes])


if TYPE_CHECKING:
    Bytes = bytes | memoryview
    """Bytes, or a read-only view: captures are large, and copying them is slow."""
else:
    Bytes = bytes  # msgspec does not support this union


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor without a copy of its bytes: they are those of `parts`, one after the other."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Bytes, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(map(len, self.parts))

    def joined(self) -> TensorData:
        """The same tensor, with its parts copied into one."""
        return TensorData(self.dtype, self.shape, b"".join(self.parts))


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of a session's history: `first` to before `end` (None: to the end), or only the `last` of the context
    that a pass completes. A decoded token is always the last.
    """

    first: int = 0
    end: int | None = None
    last: bool = False


ALL, LAST = Positions(), Positions(last=True)


class PartKind(StrEnum):
    """What a part of a position's numbers is made of."""

    HEADS = "heads"
    NEURONS = "neurons"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class Part:
    """Which heads, neurons or experts of a point are changed, by their numbers, which rise, of how many."""

    kind: PartKind
    chosen: tuple[int, ...]
    of: int


class Need(NamedTuple):
    """The engine needs a dictionary's file: that with this digest, of that width, with so many features at least."""

    digest: str
    width: int
    features: int


@dataclass(frozen=True, slots=True)
class OfTopK:
    """A feature of a TopK dictionary. It is active only among the `k` largest of a position, so all of them have to be
    computed: the engine needs the file with that digest as long as it needs this.
    """

    digest: str
    width: int
    k: int
    index: int

    @property
    def need(self) -> Need:
        """What the engine needs for it."""
        return Need(self.digest, self.width, max(self.k, self.index + 1))


@dataclass(frozen=True, slots=True)
class Gate:
    """Holds at positions where a value is above one number, below another, or both; None sets no end.

    The value is `h . along`, where `along` is `[width]`. With `hidden` it is the last number of a probe with so many
    neurons, and `along` has all of its weights, as `StoredProbe` says. A feature `of_topk` that is not active is below
    any end. `h` is all that stands at the position when the turn of this comes, whatever part of it is changed. All
    numbers are of float32.
    """

    along: TensorData
    above: float | None = None
    below: float | None = None
    hidden: int | None = None
    of_topk: OfTopK | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """How a feature's activation follows from `z`, the product of `h` with its encoder: `relu(scale * z + bias)` where
    `z + gate > threshold`, else 0. All are numbers of float32.
    """

    scale: float
    bias: float
    gate: float
    threshold: float
    of_topk: OfTopK | None = None
    reads: Point | None = None
    """Of a transcoder: the point of the same layer that it reads, below the one that is changed. `h` is what stands
    there. None: both are the same.
    """


class _Digested:
    """Keeps what `Edit.digest` has made, beside the fields: it is no part of the value."""

    __slots__ = ("_digest",)
    _digest: bytes


@dataclass(frozen=True, slots=True)
class Edit(_Digested):
    """One change at some positions of a point, which is told beside it.

    `vector` is float32 `[width]` of the point; with a `part` it may have only what that takes: `[head_dim]`, for each
    head, or a number for each neuron or expert. With rows, `[rows, width]`, each position has its own: the first is
    that of `positions.first`. A written checkpoint has rows in the model's dtype.

    With a `part` of heads, `h` is one head after the other, and the edit is made for each; with one of neurons or
    experts, `h` is these. `keep_norm` brings what comes out to the length of `h` (L2); zeros stay zeros. The change is
    shortened to the length `max_norm` where it is longer. Only where `gate` holds is anything changed.

    With a `feature`, `vector` is its encoder, as wide as what it reads, and then its decoder `[width]`. Its activation
    is scaled, clamped to `factor` or ablated: `h` changes by the decoder times what the activation changes by. So what
    the dictionary does not reconstruct stays.
    """

    op: EditOp
    factor: float = 1.0
    vector: TensorData | None = None
    positions: Positions = ALL
    max_norm: float | None = None
    part: Part | None = None
    keep_norm: bool = False
    gate: Gate | None = None
    feature: Feature | None = None

    @property
    def is_elementwise(self) -> bool:
        """Whether each number of the result depends on one number of `h`: no sum is taken over a position."""
        sums = self.max_norm is not None or self.keep_norm or self.gate is not None or self.feature is not None
        return not sums and self.op not in (EditOp.PROJECT_OUT, EditOp.CLAMP)

    @property
    def has_rows(self) -> bool:
        """Whether each position has a vector of its own."""
        return self.vector is not None and len(self.vector.shape) == 2

    @property
    def tensors(self) -> tuple[TensorData, ...]:
        """All that it keeps."""
        along = () if self.gate is None else (self.gate.along,)
        return along if self.vector is None else (self.vector, *along)

    @property
    def needs(self) -> set[Need]:
        """What the engine needs for it."""
        found = [part.of_topk for part in (self.feature, self.gate) if part is not None]
        return {each.need for each in found if each is not None}

    def for_rows(self, first: int, end: int) -> Edit:
        """The same with rows `[first, end)` of its vector."""
        assert self.vector is not None
        return replace(self, vector=self.vector.rows(first, end))

    def digest(self) -> bytes:
        """16 bytes that differ for edits that do something else; `positions` is left out. Made once."""
        try:
            return self._digest
        except AttributeError:
            return self._keep_digest(self._make_digest())

    def everywhere(self) -> Edit:
        """The same without `positions`."""
        if self.positions == ALL:
            return self
        edit = replace(self, positions=ALL)
        edit._keep_digest(self.digest())
        return edit

    def _keep_digest(self, digest: bytes) -> bytes:
        object.__setattr__(self, "_digest", digest)
        return digest

    def _make_digest(self) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        more = self._more()
        state.update(repr((self.op.value, self.factor, self.max_norm, *((more,) if any(more) else ()))).encode())
        for tensor in self.tensors:
            state.update(repr((tensor.dtype, tensor.shape)).encode() + tensor.data)
        return state.digest()

    def _more(self) -> tuple[object, ...]:
        """What most edits do not have: their digests are those of KV that disks have kept since before there was it."""
        part = self.part and (self.part.kind.value, self.part.chosen, self.part.of)
        gate, feature = self.gate, self.feature
        ends = gate and (gate.above, gate.below, self.vector is None)
        rule = feature and (feature.scale, feature.bias, feature.gate, feature.threshold)
        late = [gate and (gate.hidden, gate.of_topk), feature and (feature.of_topk, feature.reads)]
        later = [each for each in late if each is not None and each != (None, None)]
        return (part, self.keep_norm, ends, *([] if rule is None else [rule]), *([repr(late)] if later else []))


@dataclass(frozen=True, slots=True)
class When:
    """Which positions a breakpoint is for; conditions that are None hold everywhere.

    `every` n holds at positions that n divides, `token_id` where this token stands. `among` are positions that have
    been chosen before; empty: all.
    """

    in_pass: Pass = Pass.ANY
    position: int | None = None
    token_id: int | None = None
    every: int | None = None
    among: Runs = ()


class Then(StrEnum):
    """What becomes of a turn when its probe finds more than it may."""

    STOP = "stop"
    """It ends before another token is chosen."""
    PAUSE = "pause"
    """It pauses where the probe is."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What is read: `weights`, float32, are those of a `StoredProbe`. With `then`, a value over `above` ends or pauses
    the turn.
    """

    name: str
    weights: TensorData
    hidden: int
    sigmoid: bool
    above: float | None = None
    then: Then | None = None


@dataclass(frozen=True, slots=True)
class TopFeatures:
    """What is read: the `top_k` most active features of the dictionary with that digest, as far as they are active. `k`
    is that of a TopK dictionary; `name` is what its owner called it.
    """

    name: str
    digest: str
    width: int
    k: int | None
    top_k: int


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Something to do at a point of each of `layers`, in passes with a position that `when` holds for. A point of the
    model that is in no layer has the first or the last one.

    `pause` stops the whole pass; the others take only those positions, and with a `gate` only where that holds. `once`:
    it goes after the first time.
    """

    id: str
    layers: tuple[int, ...]
    action: Action
    when: When = When()
    edits: tuple[Edit, ...] = ()
    once: bool = False
    timeout_s: float = 600.0
    on_timeout: OnTimeout = OnTimeout.RESUME
    point: Point = Point.RESID_POST
    heads: tuple[int, ...] = ()
    """Which are captured, rising; empty: all that the point has."""
    probe: Probe | None = None
    """That of the action `probe`."""
    features: TopFeatures | None = None
    """Those of the action `features`; with `capture` they are recorded in the place of what stands there."""
    gate: Gate | None = None
    """Of the actions `pause` and `capture`."""

    @property
    def may_pause(self) -> bool:
        """Whether it may pause a turn."""
        return self.action is Action.PAUSE or (self.probe is not None and self.probe.then is Then.PAUSE)

    @property
    def may_run_again(self) -> bool:
        """Whether a pass may run again, so that it pauses: it has to be run before it is known that it does."""
        return self.may_pause and (self.gate is not None or self.probe is not None)

    @property
    def tensors(self) -> list[TensorData]:
        """All that it keeps."""
        own = [] if self.probe is None else [self.probe.weights]
        own += [] if self.gate is None else [self.gate.along]
        return [*own, *(tensor for edit in self.edits for tensor in edit.tensors)]

    @property
    def needs(self) -> set[Need]:
        """What the engine needs for it."""
        found, read = set[Need]().union(*(edit.needs for edit in self.edits)), self.features
        if read is not None:
            found.add(Need(read.digest, read.width, max(read.top_k, read.k or 0)))
        if self.gate is not None and self.gate.of_topk is not None:
            found.add(self.gate.of_topk.need)
        return found


@dataclass(frozen=True, slots=True)
class Intervention:
    """An edit that the KV of positions `[first, end)` was computed with, at a point of the layer below a boundary. Its
    own `positions` no longer matter; a vector with a row for each position starts with that of `first`.
    """

    first: int
    end: int
    boundary: int
    edit: Edit
    only: Runs = ()
    """Those of the positions that were edited; empty: all of them."""
    point: Point = Point.RESID_POST

    @classmethod
    def at(cls, runs: Runs, boundary: int, edit: Edit, point: Point = Point.RESID_POST) -> Intervention:
        """One at the positions of `runs`, of which there is at least one."""
        whole = len(runs) == 1 and runs[0].step == 1
        return cls(runs[0].first, runs[-1].end, boundary, edit, () if whole else runs, point)

    @property
    def place(self) -> Place:
        """Where in a pass it was made."""
        return place_of(self.boundary, self.point)

    @property
    def runs(self) -> Runs:
        """The positions that were edited."""
        return self.only or (Run(self.first, self.end),)

    def clip(self, first: int, end: int) -> Intervention | None:
        """The part that concerns positions `[first, end)`; None if that is nothing."""
        if first <= self.first and self.end <= end:
            return self
        runs, edit = clip_runs(self.runs, first, end), self.edit
        if not runs:
            return None
        if edit.has_rows:
            edit = edit.for_rows(runs[0].first - self.first, runs[0].end - self.first)
        return Intervention.at(runs, self.boundary, edit, self.point)


MAX_INTERVENTIONS = 4096
"""That one session may have, whoever made them, each counted at each of its runs of positions: they are kept in memory
and in the journal, and each has to be made again if the KV is lost. While the engine copies or cuts them, all wait.
"""
MAX_INTERVENTION_BYTES = 64 << 20
"""Of the vectors of one session's interventions, each counted once, and of all written activations: they are kept in
memory and in the journal.
"""


@dataclass(frozen=True, slots=True)
class Until:
    """How far to resume: to the next breakpoint, past all of them with `end`, to a `point` of `layer` in this pass, or
    with `next_token` to the same place in the pass of the next token.
    """

    layer: int | None = None
    next_token: bool = False
    end: bool = False
    point: Point = Point.RESID_POST


NEXT_BREAKPOINT = Until()


MAX_WORK = 256
"""Edits and captures of one session, counted at each of their layers: what it may do at one position."""
OPERATION_WORK = 64
"""An edit or a capture of up to so many positions at one layer takes about as long as one of a single position."""
STEP_WORK = MAX_WORK * OPERATION_WORK
"""Positions that edits and captures may reach in one step over all sessions, counted at each layer and for each of
them, and at least `OPERATION_WORK` each time. A session that does all that it may has room for as many tokens.
"""

MAX_PASS_EDITS = 4 * MAX_WORK
"""In one pass, with those that were made at its pauses. If the KV is lost, one step makes all of them again."""


def check_work(armed: Iterable[Breakpoint], more: Breakpoint) -> None:
    """Raise `FieldOutOfRange` if `more` does too much for one step, or the session with `armed` would."""
    alone, layers = work_of([more]), len(more.layers)
    if alone > MAX_WORK:
        raise FieldOutOfRange.at(
            "layers",
            f"{layers} must be from 1 to {MAX_WORK // (alone // layers)} layers: with {alone // layers} edits "
            f"after each, the breakpoint would make {alone} at one position, and a step has room for {MAX_WORK}",
        )
    work = work_of([*armed, more])
    if work > MAX_WORK:
        raise FieldOutOfRange.at(
            "breakpoints",
            f"the session would make {work} edits and captures at one position, counted at each layer, "
            f"with this breakpoint; at most {MAX_WORK} may be: remove some, or name fewer layers or edits",
        )


def check_bytes(armed: Iterable[Edit | Breakpoint], *, param: str) -> None:
    """Raise `FieldOutOfRange` for `param` if the vectors of what one session has armed are too many: what is copied
    from other sessions can be large.
    """
    count = sum({id(each.data): len(each.data) for one in armed for each in one.tensors}.values())
    if count > MAX_INTERVENTION_BYTES:
        raise FieldOutOfRange.at(
            param,
            f"the vectors of the session's breakpoints would have {count} bytes with it; the number must be "
            f"from 0 to {MAX_INTERVENTION_BYTES}: copy fewer positions, or remove breakpoints",
        )


def work_of(breakpoints: Iterable[Breakpoint]) -> int:
    """Edits and captures that breakpoints can make at one position, each counted at every layer."""
    return sum(max(1, len(each.edits)) * len(each.layers) for each in breakpoints if each.action is not Action.PAUSE)


Swap = Callable[[bytes], bytes]
"""From a tensor's data to its digest, or back."""


class TensorTable:
    """Tensors by their digest of `digest_size` bytes, which stands for their data elsewhere."""

    def __init__(self, tensors: Iterable[bytes] = (), *, digest_size: int) -> None:
        self._size = digest_size
        self.data = {self._digest(data): data for data in tensors}
        """All of them, by digest."""
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        """By the identity of the bytes, which are kept so that no others get it: many edits share a vector."""

    def put(self, data: bytes) -> bytes:
        """Note `data`; returns what stands for it."""
        known = self._digests.get(id(data))
        if known is None:
            known = self._digests[id(data)] = self._digest(data), data
            self.data.setdefault(*known)
        return known[0]

    def get(self, stands: bytes) -> bytes:
        """The data that `stands` is for. What is no digest of a tensor here is data itself."""
        return self.data.get(stands, stands)

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=self._size).digest()


T = TypeVar("T", Breakpoint, Intervention, Edit)


def swapped(value: T, swap: Swap) -> T:
    """The same with other data in the vectors of its edits."""
    if isinstance(value, Breakpoint):
        probe = value.probe
        if probe is not None:
            probe = replace(probe, weights=replace(probe.weights, data=swap(probe.weights.data)))
        edits = tuple(swapped(edit, swap) for edit in value.edits)
        return replace(value, edits=edits, probe=probe, gate=_swapped_gate(value.gate, swap))
    if isinstance(value, Intervention):
        # A row of the journal refers to one tensor: the gate keeps its data.
        edit = swapped(replace(value.edit, gate=None), swap)
        return replace(value, edit=replace(edit, gate=value.edit.gate))
    vector = value.vector and replace(value.vector, data=swap(value.vector.data))
    return replace(value, vector=vector, gate=_swapped_gate(value.gate, swap)) if value.tensors else value


def _swapped_gate(gate: Gate | None, swap: Swap) -> Gate | None:
    return gate and replace(gate, along=replace(gate.along, data=swap(gate.along.data)))

"""Activation patching: which place of a clean prompt's pass, put into a corrupted prompt's, brings the answer back?

The method and its words are those of Meng et al. (2022, "Locating and editing factual associations in GPT") and of
Heimersheim and Nanda (2024, "How to use and interpret activation patching"): patching clean activations into a
corrupted run is denoising, the opposite is noising.

Each place is a row of its own: a fork of the run that is patched computes the positions from the changed one on once
more, with a `replace` at one point of one layer. Below that layer nothing changes. So a row begins there, with the
residual stream of the run that is patched, and keeps its KV of the layers below. Rows of a layer are in one step.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from app.batches.jobs import Places
from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Part, PartKind, Positions, TensorData, When
from app.domain.errors import EngineError, FieldOutOfRange
from app.domain.points import ABOUT, HEAD, Axis, Point
from app.domain.positions import runs_of
from app.domain.values import ModelInfo
from app.experiments.reading import (
    PART_BYTES,
    Found,
    LayersField,
    PointsField,
    PromptField,
    compute,
    encode,
    find_sites,
    position_bytes,
    read_prompt,
    together,
)
from app.messages import Above
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.text.tokenizer import Tokens
from app.wire.base import MAX_COUNT, ErrorBody, LongList, TokenId, WireModel, any_event, check_token_ids
from app.wire.tensors import to_float32, vector_of, write_file

MAX_ROWS = 100_000
"""Of one sweep."""
GROUP_ROWS, GROUP_TOKENS = 64, 256
"""Rows that are computed at once while nobody else waits, and their tokens: more make them no faster."""
SHARE = 0.1
"""Of the time, that rows take while others have turns."""
ABOVE_TOKENS = 64
"""Of a row that begins above the first layer, at most: no step cuts it. Longer ones are cut as prompts are."""

Token = Annotated[str, Field(min_length=1, max_length=256)] | TokenId


class MetricBody(WireModel):
    """What is measured at the last position: the logit of `answer` less that of `wrong`, the probability of `answer`,
    or in nats the Kullback-Leibler divergence from the clean run's distribution.
    """

    kind: Literal["logit_difference", "probability", "kl"] = "logit_difference"
    answer: Token | None = Field(None, description="a token id, or a text of one token, such as ' Mary'")
    wrong: Token | None = Field(None, description="the same of the token that the corrupted prompt leads to")

    @model_validator(mode="after")
    def _has_its_tokens(self) -> Self:
        needed = {"logit_difference": ("answer", "wrong"), "probability": ("answer",), "kl": ()}[self.kind]
        for name in ("answer", "wrong"):
            if (getattr(self, name) is None) == (name in needed):
                does = "needs it" if name in needed else "does not take it"
                raise FieldOutOfRange(f"metric.{name}: {self.kind} {does}", param=f"metric.{name}")
        return self


class PatchingBody(WireModel):
    """Two prompts of as many tokens, a metric, and the places to patch: each of `layers` and `positions` at each of
    `points`, alone; or with `by` head, each head at all of `positions`.
    """

    clean: PromptField = Field(description="a text or token ids: the prompt that leads to the answer")
    corrupted: PromptField = Field(description="the same with another answer, of as many tokens")
    metric: MetricBody
    points: PointsField = Field(default_factory=lambda: ["resid_post"], description="names, TransformerLens's too")
    layers: LayersField | None = Field(None, description="counted from 0 (default: all that have the point)")
    positions: Annotated[LongList[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(min_length=1)] | None = Field(
        None, description="of the prompts' tokens (default: from the first one that differs)"
    )
    by: Literal["position", "head"] = Field("position", description="head: for points that have heads, such as z")
    into: Literal["corrupted", "clean"] = Field(
        "corrupted", description="the run that is patched, with activations of the other one"
    )
    stream: bool = Field(False, description="answer with server-sent events, one for each place as soon as it is done")


class PatchingTable(BaseModel):
    """The metric with each place of one point patched: a list for each layer, with a value for each of `columns`, which
    are positions, or heads. `normalized` is 0 where the run that is patched stays as it is, and 1 where it becomes the
    other one.
    """

    point: str
    by: Literal["position", "head"]
    layers: list[int]
    columns: list[int]
    values: list[list[float]]
    normalized: list[list[float | None]]


class PatchingPrompts(BaseModel):
    """What the prompts are. `clean` and `corrupted` are the metric of the prompts as they are."""

    clean_token_ids: list[int]
    corrupted_token_ids: list[int]
    clean_texts: list[str]
    corrupted_texts: list[str]
    clean: float
    corrupted: float


class PatchingResult(PatchingPrompts):
    """A whole sweep. `clean` and `corrupted` are the metric of the prompts as they are."""

    object: Literal["experiment.patching"] = "experiment.patching"
    metric: Literal["logit_difference", "probability", "kl"]
    into: Literal["corrupted", "clean"]
    tables: list[PatchingTable]
    seconds: float


class PatchingStarted(PatchingPrompts):
    """What the prompts are and give, before anything is patched; `rows` places follow."""

    rows: int


class PatchedPlace(BaseModel):
    """The metric with one place patched. `column` is its position, or its head."""

    point: str
    layer: int
    column: int
    value: float
    normalized: float | None


PatchingEvent = any_event(
    "PatchingEvent",
    ("started", "PatchingStartedEvent", "The first event.", PatchingStarted),
    ("row", "PatchedPlaceEvent", "One place is done.", PatchedPlace),
    ("finished", "PatchingFinishedEvent", "The last event of a sweep that is over.", PatchingResult),
    ("error", "PatchingErrorEvent", "The last event of a sweep that has failed.", ErrorBody),
)


class _Place(NamedTuple):
    """A row: what is patched, in which layer, and the first position that changes."""

    point: Point
    layer: int
    column: int
    first: int


class Sweep:
    """One request. Iterate over `run` once; then `result` has all of it."""

    def __init__(self, registry: SessionRegistry, places: Places, tokens: Tokens, owner: str | None) -> None:
        self._registry, self._places, self._tokens, self._owner = registry, places, tokens, owner
        self._info: ModelInfo = registry.executor.engine.info
        self._values: dict[tuple[Point, int, int], float] = {}
        self._below: dict[int, TensorData] = {}
        """By layer, what it takes in the run that is patched."""

    def check(self, body: PatchingBody) -> None:
        """Make the prompts tokens, which takes long for long ones. Raises `FieldOutOfRange`, `ContextTooLong`."""
        info, tokens = self._info, self._tokens
        clean, corrupted = (encode(getattr(body, name), tokens, info, param=name) for name in ("clean", "corrupted"))
        if len(clean) != len(corrupted):
            raise FieldOutOfRange(
                f"corrupted: its {len(corrupted)} tokens must be as many as the {len(clean)} of clean: each is "
                "patched from the same one",
                param="corrupted",
            )
        differ = [position for position, pair in enumerate(zip(clean, corrupted, strict=True)) if pair[0] != pair[1]]
        if not differ:
            raise FieldOutOfRange("corrupted: the same tokens as clean: nothing would change", param="corrupted")
        positions = sorted(set(body.positions or range(differ[0], len(clean))))
        if positions[-1] >= len(clean):
            raise FieldOutOfRange(
                f"positions: {positions[-1]} must be from 0 to {len(clean) - 1}: the prompts have {len(clean)} tokens",
                param="positions",
            )
        sites = find_sites(body.points, body.layers, info)
        for point in sites:
            about = ABOUT[point]
            if not about.edits or point in HEAD:
                why = about.no_edit or "it is behind what is measured"
                raise FieldOutOfRange(f"points: {point} cannot be patched: {why}", param="points")
            if body.by == "head" and about.axis is not Axis.HEADS:
                raise FieldOutOfRange(f"by: {point} has no heads: give points such as z, q, k or v", param="by")
        places = ((point, layer) for point, layers in sites.items() for layer in layers)
        rows = sum(len(positions) if body.by == "position" else self._heads(*place) for place in places)
        if rows > MAX_ROWS:
            raise FieldOutOfRange(
                f"layers: {rows} places would be patched, and at most {MAX_ROWS} are in one sweep", param="layers"
            )
        given = [each for each in ("answer", "wrong") if getattr(body.metric, each) is not None]
        ids = [self._token(getattr(body.metric, each), param=f"metric.{each}") for each in given]
        self._body, self._rows = body, rows
        self._ids = {"clean": clean, "corrupted": corrupted}
        self._sites, self._positions = sites, positions
        self._wanted = tuple(ids) if body.metric.kind == "logit_difference" else None  # the tokens of the logits
        self._answer = ids[0] if ids else 0

    def _heads(self, point: Point, layer: int) -> int:
        found = self._info.points[point][layer]
        return 1 if found is None else found.heads

    def _token(self, given: str | int, *, param: str) -> int:
        if isinstance(given, int):
            check_token_ids([given], self._info.vocab_size, param=param)
            return given
        found = self._tokens.encode(given, add_special_tokens=False)
        if len(found) != 1:
            raise FieldOutOfRange(f"{param}: {given!r} must be 1 token, and is {len(found)}", param=param)
        return found[0]

    async def run(self) -> AsyncIterator[PatchingStarted | PatchedPlace]:
        """Every place as it is done, layers upward, point by point. The caller may leave at any moment.

        Raises what sessions and turns do, and `ActivationsFull`.
        """
        registry, began = self._registry, time.perf_counter()
        async with AsyncExitStack() as opened:
            bases = dict[str, Session]()
            for name, token_ids in self._ids.items():
                bases[name] = await opened.enter_async_context(registry.ephemeral(self._owner, unseen=True))
                registry.whitebox.arm_now(bases[name], self._last_capture())
                await compute(registry, bases[name], token_ids, param=name)
            logits = await registry.whitebox.logits(list(bases.values()), self._wanted)
            self._clean_logprobs = _log_softmax(logits[0])
            self._clean, self._corrupted = map(self._measure, logits)
            yield PatchingStarted(rows=self._rows, **self._prompts())
            patched = bases[self._body.into]
            await registry.whitebox.disarm(patched, None)
            async for layers in self._sources():
                await self._read_below(layers)
                for group in self._groups(layers):
                    for place, value in zip(group, await self._patched(patched, group, layers), strict=True):
                        self._values[place[:3]] = value
                        yield PatchedPlace(
                            point=place.point,
                            layer=place.layer,
                            column=place.column,
                            value=value,
                            normalized=self._normalized(value),
                        )
        self._seconds = time.perf_counter() - began

    def _last_capture(self) -> Breakpoint:
        """Records what the head is applied to: the last residual stream of the last position."""
        last = When(position=len(self._patched_ids) - 1)
        return Breakpoint(f"last_{secrets.token_hex(4)}", (self._info.num_layers - 1,), Action.CAPTURE, last)

    async def _sources(self) -> AsyncIterator[Found]:
        """What the other run has at the chosen positions: some layers at a time, as there is room for."""
        source = self._ids["clean" if self._body.into == "corrupted" else "corrupted"]
        for point, layers in self._sites.items():
            nbytes = len(self._positions) * position_bytes({point: layers[:1]}, self._info, 0)
            nbytes += (len(source) - self._positions[0]) * position_bytes({Point.RESID_POST: (0,)}, self._info, 0)
            some = max(1, PART_BYTES // nbytes)
            for first in range(0, len(layers), some):
                sites = {point: layers[first : first + some]}
                found = await read_prompt(
                    self._registry, self._owner, source, sites, runs_of(self._positions), param=self._body.into
                )
                # Joined once, here: each place takes its rows of it.
                yield {site: replace(each, parts=(each.joined().data,)) for site, each in found.items()}

    async def _read_below(self, found: Found) -> None:
        """Note what the layers of these sites take in the run that is patched, from the first chosen position on.
        A layer that folds tokens has no KV of single positions: there rows begin in the first layer.
        """
        below = tuple(sorted({layer - 1 for _, layer in found if layer}))
        self._below = {}
        shortest = len(self._patched_ids) - self._positions[-1 if self._body.by == "position" else 0]
        if below and not self._info.state_bytes and shortest <= ABOVE_TOKENS:
            among = runs_of(range(self._positions[0], len(self._patched_ids)))
            read = await read_prompt(
                self._registry, self._owner, self._patched_ids, {Point.RESID_POST: below}, among, param=self._body.into
            )
            self._below = {layer + 1: tensor.joined() for (_, layer), tensor in read.items()}

    @property
    def _patched_ids(self) -> list[int]:
        return self._ids[self._body.into]

    def _groups(self, found: Found) -> list[list[_Place]]:
        """The places of these layers, as many together as are computed at once."""
        groups, length = list[list[_Place]](), len(self._patched_ids)
        for point, layer in sorted(found, key=lambda site: site[1]):
            tokens = 0
            groups.append([])
            for place in self._places_of(point, layer):
                if groups[-1] and (len(groups[-1]) >= GROUP_ROWS or tokens + length - place.first > GROUP_TOKENS):
                    groups.append([])
                    tokens = 0
                groups[-1].append(place)
                tokens += length - place.first
        return groups

    def _places_of(self, point: Point, layer: int) -> list[_Place]:
        positions = self._positions
        if self._body.by == "head":
            return [_Place(point, layer, head, positions[0]) for head in range(self._heads(point, layer))]
        return [_Place(point, layer, position, position) for position in positions]

    async def _patched(self, base: Session, group: Sequence[_Place], found: Found) -> list[float]:
        """The metric of each place, all at once. While others have turns, there is a rest after them: fewer rows at a
        time would take more of the others' steps, and more of their time.
        """
        values = list[float]()
        while len(values) < len(group):
            async with self._places.place():
                began = time.perf_counter()
                others = self._places.others_run()
                some = group[len(values) : len(values) + self._at_once(len(group))]
                values += await self._compute(base, some, found)
                spent = time.perf_counter() - began
            if others:
                await self._places.rest(spent * (1 / SHARE - 1))
        return values

    def _at_once(self, rows: int) -> int:
        """How many rows the owner may have, of so many: each is a session with a turn."""
        most = self._registry.table.free(self._owner, rows)
        return max(1, min(most, self._registry.turns.free(self._owner)))

    async def _compute(self, base: Session, group: Sequence[_Place], found: Found) -> list[float]:
        """One row for each place."""
        registry, token_ids, param = self._registry, self._patched_ids, self._body.into
        async with AsyncExitStack() as opened:
            rows, turns = list[Session](), list[Coroutine[Any, Any, None]]()
            for place in group:
                above = self._above(place)
                length = place.first if above is None else len(token_ids)
                fork = registry.ephemeral(self._owner, unseen=True, prefix=(base, length))
                row = await opened.enter_async_context(fork)
                registry.whitebox.arm_now(row, self._patch(place, found), self._last_capture())
                rows.append(row)
                turns.append(compute(registry, row, token_ids[length:], param=param, above=above))
            await together(turns)
            logits = await registry.whitebox.logits(rows, self._wanted)
        return [self._measure(each) for each in logits]

    def _above(self, place: _Place) -> Above | None:
        """Where the row's pass begins. None: in the first layer."""
        below = self._below.get(place.layer)
        if below is None or len(self._patched_ids) - place.first > ABOVE_TOKENS:
            return None
        skipped = place.first - self._positions[0]
        return Above(place.first, place.layer, below.rows(skipped, below.shape[0]))

    def _patch(self, place: _Place, found: Found) -> Breakpoint:
        """Puts the other run's activation there."""
        positions, tensor = self._positions, found[place.point, place.layer]
        values = to_float32(tensor.joined()).reshape(len(positions), -1)
        when, part = When(position=place.first), None
        if self._body.by == "head":
            heads = self._heads(place.point, place.layer)
            of_head = values.reshape(len(positions), heads, -1)[:, place.column]
            rows = np.zeros((positions[-1] + 1 - place.first, of_head.shape[1]), "<f4")  # those between are not used
            rows[np.array(positions) - place.first] = of_head
            when, part = When(among=runs_of(positions)), Part(PartKind.HEADS, (place.column,), heads)
            vector = TensorData("float32", rows.shape, rows.tobytes())
        else:
            vector = vector_of(values[positions.index(place.column)])
        edit = Edit(EditOp.REPLACE, vector=vector, positions=Positions(first=place.first), part=part)
        return Breakpoint(f"patch_{place.column}", (place.layer,), Action.EDIT, when, (edit,), point=place.point)

    def _measure(self, logits: NDArray[np.float32]) -> float:
        """The metric of one row's logits: of the tokens that were asked for, or of all. Raises `EngineError`."""
        if not np.isfinite(logits).all():
            raise EngineError("the model gives numbers that are not finite for this prompt")
        if self._body.metric.kind == "logit_difference":
            return float(logits[0]) - float(logits[1])
        logprobs = _log_softmax(logits)
        if self._body.metric.kind == "probability":
            return float(np.exp(logprobs[self._answer]))
        return float(np.sum(np.exp(self._clean_logprobs) * (self._clean_logprobs - logprobs)))

    def _normalized(self, value: float) -> float | None:
        """0 as the run that is patched, 1 as the other; None: the two give the same."""
        here, there = self._corrupted, self._clean
        if self._body.into == "clean":
            here, there = there, here
        return None if here == there else (value - here) / (there - here)

    @property
    def result(self) -> PatchingResult:
        """All of it, once `run` has ended."""
        return PatchingResult(
            **self._prompts(),
            metric=self._body.metric.kind,
            into=self._body.into,
            tables=[self._table(point, layers) for point, layers in self._sites.items()],
            seconds=self._seconds,
        )

    def _prompts(self) -> dict[str, Any]:
        """The fields of `PatchingPrompts`."""
        found: dict[str, Any] = {"clean": self._clean, "corrupted": self._corrupted}
        for name, token_ids in self._ids.items():
            found[f"{name}_token_ids"] = token_ids
            found[f"{name}_texts"] = [self._tokens.decode([each], skip_special_tokens=False) for each in token_ids]
        return found

    def _table(self, point: Point, layers: Sequence[int]) -> PatchingTable:
        columns = [place.column for place in self._places_of(point, layers[0])]
        values = [[self._values[point, layer, column] for column in columns] for layer in layers]
        normalized = [[self._normalized(value) for value in row] for row in values]
        return PatchingTable(
            point=point,
            by=self._body.by,
            layers=list(layers),
            columns=columns,
            values=values,
            normalized=normalized,
        )


def to_file(result: PatchingResult) -> bytes:
    """The result as safetensors: a float32 tensor `[layers, columns]` for each point. The metadata has the rest, as
    JSON under `experiment`.
    """
    tensors = {}
    for table in result.tables:
        values = np.array(table.values, "<f4")
        tensors[table.point] = TensorData("float32", values.shape, values.tobytes())
    about = result.model_dump(exclude={"tables": {"__all__": {"values", "normalized"}}})
    return write_file(tensors, {"experiment": json.dumps(about)})


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    found: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return found

"""What the two processes tell each other, beside commands and events, as MessagePack.

Frames of one direction keep their order. Nothing in a frame is executed, and only types that are listed here are made.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import structs

from app.domain.activations import (
    Activation,
    ActivationMap,
    ActivationNorms,
    Attribution,
    Captures,
    FeatureRows,
    LensRows,
    PausedTurn,
)
from app.domain.breakpoints import Bytes, Edit, Intervention, TensorData, swapped
from app.domain.errors import DjinnError, EngineError
from app.domain.memory_map import MemoryMap
from app.domain.points import ORDER, Point
from app.domain.positions import Run
from app.domain.values import Grammar, LoadedAdapter, ModelInfo, Ticket, WeightsDtype
from app.logs import Log
from app.machine.budget import DiskRoom
from app.messages import (
    Command,
    Done,
    Event,
    ExportedKV,
    ImportedKV,
    KeptKV,
    Open,
    ReceivedPrompt,
    ReceiveKV,
    Reinstate,
    SentKV,
    Token,
    TurnFinished,
)
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import EngineSettings, Settings


@dataclass(frozen=True, slots=True)
class Load:
    """To the engine, before all else: load this model, which is on the disk already. Answered by `Loaded`. One with
    `only_find` may come before: all that is needed to find the model is imported then.

    KV files leave `reserve` bytes free on the disk of `disk`.
    """

    model: str
    """As `resolve` takes it."""
    name: str | None
    """The first of its names; None: as `resolve` calls it."""
    cache_dir: str
    seed: int
    weights_dtype: WeightsDtype
    disk: str
    reserve: int
    log: Log
    engine: EngineSettings
    only_find: bool = False

    @classmethod
    def of(cls, settings: Settings, log_level: int) -> Load:
        """The part of the settings that an engine process needs. It has no keys."""
        folder = settings.state_dir
        return cls(
            model=settings.model,
            name=next(iter(settings.served_model_name), None),
            cache_dir=str(settings.cache_dir.expanduser()),
            seed=settings.seed,
            weights_dtype=WeightsDtype(settings.weights_dtype),
            disk=tempfile.gettempdir() if folder is None else str(folder.expanduser()),
            reserve=0 if folder is None else int(settings.disk_reserve),
            log=Log(log_level, settings.log_format, settings.replica),
            engine=settings.engine(),
        )

    def find_model(self) -> ResolvedModel:
        """The model under the name that it is served by; the first time it may be fetched. Raises `DjinnError`."""
        model = resolve(self.model, cache_dir=Path(self.cache_dir), seed=self.seed, weights_dtype=self.weights_dtype)
        return replace(model, name=self.name or model.name)

    def disk_room(self) -> DiskRoom:
        """That beside the journal, or where the system keeps temporary files."""
        return DiskRoom(Path(self.disk), self.reserve)


@dataclass(frozen=True, slots=True)
class Compile:
    """To the engine: compile a grammar, and hold it until `Release`. Answered by `Compiled`."""

    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Release:
    """To the engine: the grammar of `Compile` is no longer needed."""

    number: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """To the engine: read the vocabulary, on which the first grammar would wait."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To the engine: end what runs, and the process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """From the engine: it takes commands; or it cannot run with these settings, and the process ends."""

    found: ModelInfo | None
    error: DjinnError | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """From the engine: the grammar of `Compile` is compiled, or refused with `error`."""

    number: int
    error: DjinnError | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """From the engine, each second: it has not got on for `busy_s` seconds, 0 if it waits for messages."""

    busy_s: float


@dataclass(frozen=True, slots=True)
class Dying:
    """From the engine: it has failed, and the process ends."""

    reason: str


ToEngine = Load | Compile | Release | Prepare | Stop
FromEngine = Loaded | Compiled | Beat | Dying


T = TypeVar("T")
Interventions = tuple[Intervention, ...]
SentIntervention = tuple[int, int, int, int, tuple[Run, ...], int]
"""The fields of an intervention; its edit and its point by their numbers."""
EDIT_FIELDS = [field.name for field in fields(Edit) if field.init]
SentEdit: Any = GenericAlias(tuple, tuple(get_type_hints(Edit)[name] for name in EDIT_FIELDS))
"""The fields of an edit, which has, in the place of a tensor's data, its number in four bytes."""
Sent = tuple[list[bytes], list[SentEdit], list[list[SentIntervention]]]
"""Data of tensors; edits; lists of interventions."""


def take_out(value: T) -> tuple[T, Sent | None]:
    """What is sent of `value`, and its interventions beside it, if it has any."""
    if isinstance(value, Reinstate):
        paused = value.paused
        bare = structs.replace(value, interventions=(), paused=None if paused is None else _with(paused, ()))
        return bare, pack(value.interventions, () if paused is None else paused.interventions)
    if isinstance(value, Open | PausedTurn | ReceiveKV | TurnFinished) and value.interventions:
        return _with(value, ()), pack(value.interventions)
    return value, None


def put_back(value: T, plain: Any) -> T:
    """The value that `take_out` was given. Raises `msgspec.MsgspecError` or `IndexError` for what it has not made."""
    first, *others = unpack(plain)
    if isinstance(value, Reinstate):
        [second] = others
        paused = None if value.paused is None else _with(value.paused, second)
        return structs.replace(value, interventions=first, paused=paused)
    assert isinstance(value, Open | PausedTurn | ReceiveKV | TurnFinished)
    return _with(value, first)


def _with(value: T, interventions: Interventions) -> T:
    """The same value with other interventions."""
    change: Any = replace if is_dataclass(value) else structs.replace
    found: T = change(value, interventions=interventions)
    return found


def pack(*lists: Interventions) -> Sent:
    """Lists of interventions that share edits and tensors."""
    places, edits = dict[bytes, int](), list[tuple[Any, ...]]()
    numbers = dict[int, int]()
    """Of edits, by their identity: to compare each would take long."""

    def place(data: bytes) -> bytes:
        return places.setdefault(data, len(places)).to_bytes(4)

    for each in chain.from_iterable(lists):
        if id(each.edit) not in numbers:
            numbers[id(each.edit)] = len(edits)
            sent = swapped(each.edit, place)
            edits.append(tuple(getattr(sent, name) for name in EDIT_FIELDS))

    def row(made: Intervention) -> SentIntervention:
        return made.first, made.end, made.boundary, numbers[id(made.edit)], made.only, ORDER[made.point]

    return list(places), edits, [list(map(row, made)) for made in lists]


def unpack(plain: Any) -> Iterator[Interventions]:
    """The lists again; equal edits are one object, and so are the data of equal tensors."""
    tensors, sent_edits, lists = msgspec.convert(plain, Sent)
    edits = [swapped(Edit(*each), lambda place: tensors[int.from_bytes(place)]) for each in sent_edits]
    points = list(Point)
    for rows in lists:
        yield tuple([Intervention(first, end, at, edits[n], only, points[p]) for first, end, at, n, only, p in rows])


Frame = Command | ToEngine | FromEngine
FRAMES: dict[str, type[Any]] = {each.__name__: each for each in get_args(Frame)}
EVENTS: dict[str, type[Any]] = {each.__name__: each for each in get_args(Event)}
VALUES: dict[str, Any] = {
    "NoneType": None,
    "int": int,
    **{each.__name__: each for each in (Activation, ActivationMap, ActivationNorms, Captures, ExportedKV, ImportedKV)},
    **{each.__name__: each for each in (KeptKV, LensRows, LoadedAdapter, MemoryMap, PausedTurn)},
    **{each.__name__: each for each in (ReceivedPrompt, SentKV, TensorData, FeatureRows, Attribution)},
}
"""What a `Done` may carry, by the name of its type."""

Plain = Any
"""Numbers, strings, bytes, lists and dictionaries."""

PAIR, ARRAY, EXTENSION = b"\x92", struct.Struct(">BI"), struct.Struct(">BIb")
"""The first bytes of a pair, an array (0xdd) and an extension type (0xc9) in MessagePack, with their lengths
(https://github.com/msgpack/msgpack/blob/master/spec.md). msgspec decodes the data of an extension without a copy.
"""
VIEWED_BYTES = 512 << 10
"""Shorter data are copied after all: a view holds the memory and the file descriptor of its whole frame."""


def encode(frame: Frame) -> bytes:
    """One frame that is no event."""
    return msgspec.msgpack.encode((type(frame).__name__, *take_out(frame)), enc_hook=_to_plain)


def encode_events(events: Sequence[Event]) -> list[Bytes]:
    """The events of a step as the parts of one frame: first the events, then the bytes of captures, without a copy.
    This calls the function of a `Done`, and sends what the function returns.
    """
    behind = list[Bytes]()
    plain = [  # most events are tokens: a pair of numbers, without a call for each
        (event.ticket, event.token_id) if type(event) is Token and event.logprobs is None else _pack(event, behind)
        for event in events
    ]
    packed = msgspec.msgpack.encode(plain, enc_hook=_to_plain)
    parts: list[Bytes] = [PAIR + packed + ARRAY.pack(0xDD, len(behind))]
    for data in behind:
        parts += EXTENSION.pack(0xC9, len(data), 0), data
    return parts


def decode(data: bytes | memoryview) -> Frame | list[Event]:
    """A frame, or the events of a step. Captures are views of `data`, not copies. Raises `msgspec.MsgspecError` or
    `KeyError` for what was not encoded here.
    """
    found: Plain = msgspec.msgpack.decode(
        data, ext_hook=lambda _, view: view if len(view) >= VIEWED_BYTES else bytes(view)
    )
    if isinstance(found[0], str):
        name, *sent = found
        frame: Frame = _made_of(sent, FRAMES[name])
        return frame
    events, behind = found
    views = iter(behind)
    return [_unpack(event, views) for event in events]


def _pack(event: Event, behind: list[Bytes]) -> tuple[Plain, ...]:
    """The part of an event that is sent in its place. The bytes of captures are added to `behind`."""
    if isinstance(event, Done):
        is_made = callable(event.value)
        value: Any = event.value() if callable(event.value) else event.value
        if isinstance(value, Captures):
            behind += [part for each in value.records for part in each.tensor.parts]
            value = _with_parts(value, repeat(b""))
        return ("Done", event.ticket, type(value).__name__, is_made, *take_out(value))
    return (type(event).__name__, *take_out(event))


def _unpack(packed: list[Plain], behind: Iterator[memoryview]) -> Event:
    if len(packed) == 2 and isinstance(packed[0], int):
        return Token(Ticket(packed[0]), packed[1])
    name, *fields = packed
    if name == "Done":
        ticket, kind, is_made, *sent = fields
        value = _made_of(sent, VALUES[kind])
        if isinstance(value, Captures):
            value = _with_parts(value, behind)
        return Done(ticket, (lambda: value) if is_made else value)
    event: Event = _made_of(fields, EVENTS[name])
    return event


def _with_parts(captures: Captures, parts: Iterator[Bytes]) -> Captures:
    """The same captures, whose parts are replaced by the next ones of `parts`."""
    taken = ((each, tuple(next(parts) for _ in each.tensor.parts)) for each in captures.records)
    records = (replace(each, tensor=replace(each.tensor, parts=own)) for each, own in taken)
    return replace(captures, records=tuple(records))


def _made_of(sent: list[Plain], kind: Any) -> Any:
    """A value of the `kind` again, of what `take_out` has made of it."""
    plain, interventions = sent
    value = msgspec.convert(plain, kind, dec_hook=_from_plain)
    return value if interventions is None else put_back(value, interventions)


def _to_plain(value: object) -> Plain:
    """What MessagePack has no type for."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, DjinnError):
        return (type(value).__name__, vars(value))
    if isinstance(value, int):  # of a type that adds nothing, such as pydantic's for sizes
        return int(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _from_plain(kind: type[Any], plain: Plain) -> Any:
    if issubclass(kind, Path):
        return Path(plain)
    if issubclass(kind, DjinnError):
        return _error(plain)
    raise NotImplementedError(f"a {kind.__name__} cannot be received")


def _error(plain: Plain) -> DjinnError:
    """The error again. One of a kind that only the other process knows is an `EngineError` here."""
    name, fields = plain
    kind = next((each for each in _kinds(DjinnError) if each.__name__ == name), EngineError)
    error = kind.__new__(kind, fields["message"])
    vars(error).update(fields)
    return error


def _kinds(base: type[DjinnError]) -> Iterator[type[DjinnError]]:
    yield base
    for each in base.__subclasses__():
        yield from _kinds(each)

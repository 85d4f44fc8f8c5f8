"""What the two processes tell each other, beside commands and events. Frames of one direction keep their order."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from app.domain.errors import DjinnError
from app.domain.values import Grammar, ModelInfo, WeightsDtype
from app.logs import Log
from app.machine.files import DiskRoom
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import EngineSettings, Settings


@dataclass(frozen=True, slots=True)
class Load:
    """To the engine, before all else: load this model, which is on the disk already. Answered by `Loaded` or
    `NotLoaded`. One with `only_find` may come before: all that is needed to find the model is imported then.

    KV files leave `reserve` bytes free on the disk of `disk`.
    """

    model: str
    """As `resolve` takes it."""
    served_name: str | None
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
            served_name=settings.served_name,
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
        return replace(model, name=self.served_name or model.name)

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
    """From the engine: it takes commands."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """From the engine: it cannot run with these settings. The process ends."""

    error: DjinnError


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
FromEngine = Loaded | NotLoaded | Compiled | Beat | Dying

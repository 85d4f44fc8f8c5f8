"""What the two processes tell each other, beside commands and events. Frames of one direction keep their order."""

from dataclasses import dataclass

from app.domain.errors import DjinnError
from app.domain.values import Grammar, ModelInfo, WeightsDtype
from app.logs import Log
from app.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Load:
    """To the engine, before all but `Find`: load this model, which is on the disk already. Answered by `Loaded` or
    `NotLoaded`.

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


@dataclass(frozen=True, slots=True)
class Find:
    """To the engine, before `Load` if at all: find the model, which is on the disk already. All that this needs is
    imported then.
    """

    load: Load


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


ToEngine = Load | Find | Compile | Release | Prepare | Stop
FromEngine = Loaded | NotLoaded | Compiled | Beat | Dying

"""What every kind of server has in common, and the data type in which each runs."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loadgen.processes.launch import Calibration, Launch, calibrate

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
AUTO = "auto"
"""Each in its best type: Djinn and PyTorch in what this machine multiplies fastest, llama.cpp in a quantization."""
CHOICES = (AUTO, *ELEMENT_BYTES)
"""What a command line can ask for."""


SERVED_NAME = "model"
"""What every peer calls the model, whatever folder it comes from."""

Say = Callable[[str], None]
"""Told what is being done, a line at a time."""


def available_cores() -> tuple[int, ...]:
    """The cores that this process, and so every server that it starts, may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What all servers of a comparison are given alike.

    `model` is a Transformers folder (or what else Djinn takes as a model). `kv_tokens` is the room for KV on the
    device, in tokens; None leaves it to the server. `context_tokens` is the longest that any conversation becomes, for
    servers that must be told how many of them can run at once; None: unknown. `state` is an empty folder in which Djinn
    keeps KV files; None: it has no disk tier.
    """

    model: Path
    dtype: str
    kv_tokens: int | None = None
    context_tokens: int | None = None
    state: Path | None = None
    cores: tuple[int, ...] = field(default_factory=available_cores)


class Peer(Protocol):
    """One kind of server."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in reports."""
        ...

    def is_installed(self) -> bool:
        """Whether it could be started."""
        ...

    def install(self, say: Say) -> None:
        """Make it ready to start, unless it is: pinned versions, in an environment of its own.

        Raises `LoadgenError`.
        """
        ...

    def versions(self) -> dict[str, str]:
        """Versions by package of what decides about its speed; it must be installed."""
        ...

    @property
    def served_model(self) -> str | None:
        """What to ask for in OpenAI's protocol; None of a server that is spoken to as Djinn."""
        ...

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        """How to start it on the loopback address. Raises `LoadgenError` if it cannot run with these settings."""
        ...


def on_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver."""
    return shutil.which("nvidia-smi") is not None


@dataclass(frozen=True, slots=True)
class Choice:
    """A data type; `calibration` has the figures that chose it, None where nothing had to be measured."""

    dtype: str
    calibration: Calibration | None = None


def choose_dtype(settings: ServerSettings) -> Choice:
    """What a server made of PyTorch runs in: the type that is named, or else its fastest on this machine.

    Raises `LoadgenError` if that cannot be measured.
    """
    if settings.dtype != AUTO:
        return Choice(settings.dtype)
    if on_cuda():
        return Choice("bfloat16")
    calibration = calibrate(settings.model, len(settings.cores))
    return Choice(calibration.dtype, calibration)

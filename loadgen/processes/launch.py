"""How a server is started, and what of that may be published."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadgen.processes.calibration import Calibration

ROOT = Path(__file__).resolve().parents[2]
"""Where the packages are: the checkout, or what the wheel is installed in."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and what it adds to the environment. `calibration` has the figures that chose its data type."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None

    def as_words(self) -> tuple[str, ...]:
        """The command as a shell takes it, with what it adds to the environment in front."""
        return (*(f"{name}={value}" for name, value in self.environment.items()), *self.command)


def without_folders(launch: Launch, folders: Sequence[Path]) -> Launch:
    """The launch as it may be published: files in `folders` without the place of these folders on this machine, and
    this interpreter's environment as `.venv`, wherever it is.
    """

    def shorten(text: str) -> str:
        text = text.replace(f"{sys.prefix}/", ".venv/")
        for folder in folders:
            text = "." if text == str(folder) else text.replace(f"{folder}/", "")
        return text

    environment = {name: shorten(value) for name, value in launch.environment.items()}
    return replace(launch, command=[shorten(part) for part in launch.command], environment=environment)


def flatten(flags: Mapping[str, str]) -> list[str]:
    """Flags and their values as parts of a command line."""
    return [part for pair in flags.items() for part in pair]

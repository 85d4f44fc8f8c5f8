"""How a process under test is started, and what of that may be published."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and what it adds to the environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def djinn_launch(flags: dict[str, str]) -> Launch:
    """`djinn serve` of this interpreter."""
    return Launch([sys.executable, "-m", "app", "serve", *flatten(flags)])


def without_folders(launch: Launch, folders: list[Path]) -> Launch:
    """The launch as it may be published: files in `folders` without the place of these folders on this machine, and
    this interpreter's environment as `.venv`, wherever it is.
    """

    def shorten(text: str) -> str:
        text = text.replace(f"{sys.prefix}/", ".venv/")
        for folder in folders:
            text = text.replace(f"{folder}/", "")
        return text

    environment = {name: shorten(value) for name, value in launch.environment.items()}
    return Launch([shorten(part) for part in launch.command], environment)


def flatten(flags: dict[str, str]) -> list[str]:
    """Flags and their values as parts of a command line."""
    return [part for pair in flags.items() for part in pair]

"""Where peers live, and virtual environments of their own: their pins must not meet Djinn's."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from loadgen.errors import LoadgenError

TORCH = "torch==2.13.0"
STAMP = "complete"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Begin anew, with nothing but pip in it. Raises `LoadgenError`."""
        run_step([sys.executable, "-m", "venv", "--clear", str(self.folder)])

    def pip(self, *arguments: str) -> None:
        """Have its pip do something. Raises `LoadgenError`; what pip said has been shown."""
        run_step([str(self.python), "-m", "pip", "--quiet", *arguments])

    def find(self, name: str) -> Distribution:
        """A package installed in it. Raises `LookupError` if it is not there."""
        folders = [str(folder) for folder in self.folder.glob("lib/python*/site-packages")]
        for distribution in distributions(name=name, path=folders):
            return distribution
        raise LookupError(f"{name} is not installed in {self.folder}")


def has_stamp(folder: Path, stamp: str) -> bool:
    """Whether what is in `folder` was completed, as `stamp` says."""
    file = folder / STAMP
    return file.exists() and file.read_text() == stamp


def write_stamp(folder: Path, stamp: str) -> None:
    """What is in `folder` is complete."""
    (folder / STAMP).write_text(stamp)


def run_step(command: list[str]) -> None:
    """Run one command of an installation, whose output is shown. Raises `LoadgenError` if it fails."""
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoadgenError(f"installation failed: {error}") from error

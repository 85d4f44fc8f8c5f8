"""What a result says of the servers that were measured and of the texts they were sent."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Literal

from loadgen.load.corpus import Corpus
from loadgen.processes.calibration import Calibration
from loadgen.targets import TargetSpec


@dataclass(frozen=True, slots=True)
class Server:
    """A target as it may be published: without its key. `command` is how it was started and `versions` are those of its
    packages; both are empty if that is not known. `calibration` has the figures that chose its data type, None
    if it was named or is the server's own default.
    """

    name: str
    url: str
    protocol: Literal["djinn", "openai"]
    model: str | None
    command: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None

    @classmethod
    def of(cls, spec: TargetSpec) -> Server:
        """What may be published of the target."""
        protocol: Literal["djinn", "openai"] = "djinn" if spec.model is None else "openai"
        return cls(spec.name, spec.url, protocol, spec.model, spec.command, dict(spec.versions), spec.calibration)

    @property
    def started(self) -> str:
        """The command and the versions, to be read; empty if neither is known."""
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        return f"{shlex.join(self.command)} ({versions})" if versions else shlex.join(self.command)


@dataclass(frozen=True, slots=True)
class Texts:
    """Where the words came from: runs are comparable only if the fingerprint is equal."""

    name: str
    sha256: str

    @classmethod
    def of(cls, corpus: Corpus) -> Texts:
        """Of these texts."""
        return cls(corpus.name, corpus.sha256)

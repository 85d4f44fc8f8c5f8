"""What a result says of the servers that were measured and of the texts they were sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.corpus import Corpus
from loadgen.targets import TargetSpec


@dataclass(frozen=True, slots=True)
class Server:
    """A target as it may be published: without its key. `command` is how it was started, empty if that is not known."""

    name: str
    url: str
    protocol: Literal["djinn", "openai"]
    model: str | None
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: TargetSpec) -> Server:
        """What may be published of the target."""
        return cls(spec.name, spec.url, "djinn" if spec.model is None else "openai", spec.model, spec.command)


@dataclass(frozen=True, slots=True)
class Texts:
    """Where the words came from: runs are comparable only if the fingerprint is equal."""

    name: str
    sha256: str

    @classmethod
    def of(cls, corpus: Corpus) -> Texts:
        """Of these texts."""
        return cls(corpus.name, corpus.sha256)

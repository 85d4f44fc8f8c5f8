"""Where a result comes from: the machine, the versions, the command, the servers and the texts."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import psutil

from loadgen.errors import LoadgenError
from loadgen.load.prompts import Corpus
from loadgen.processes.launch import NO_FLAGS, Calibration, processor_flags
from loadgen.targets import TargetSpec

PACKAGES = ("djinn-server", "httpx", "numpy", "torch", "transformers")
"""Whose versions decide about figures; those of a server in an environment of its own are not among them."""

SECRET_OPTION = "--api-key"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the load generator ran on. `flags` are the processor's, `cpus` is how many of its cores it may use."""

    flags: tuple[str, ...]
    cpus: int
    memory_bytes: int
    platform: str
    python: str

    @property
    def processor(self) -> str:
        """The processor by its flags, such as "avx2 avx512f avx512_bf16"."""
        return " ".join(self.flags) or NO_FLAGS

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.processor}, {self.cpus} CPUs, {memory}, {self.platform}, Python {self.python}"


def machine() -> Machine:
    """This machine."""
    return Machine(
        flags=processor_flags(),
        cpus=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        platform=platform.platform(),
        python=platform.python_version(),
    )


class DifferentProcessors(LoadgenError):
    """Results from processors with different flags were to share a page."""


def require_same_flags(results: Sequence[tuple[str, Machine]]) -> None:
    """Raise `DifferentProcessors`, which names two results and their flags, unless all have the same."""
    (first, known), *rest = results
    for name, other in rest:
        if set(other.flags) != set(known.flags):
            raise DifferentProcessors(
                f"{first} and {name} come from different processors ({known.processor}; {other.processor}): "
                "make a page of each"
            )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that are installed beside the load generator."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def published(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line that had these arguments, without keys: what may be written into a file."""
    shown = ["python", "-m", "loadgen"]
    is_secret = False
    for argument in arguments:
        option, _, value = argument.partition("=")
        if is_secret:
            shown.append(_masked(argument))
        elif option == SECRET_OPTION and value:
            shown.append(f"{option}={_masked(value)}")
        else:
            shown.append(argument)
        is_secret = not is_secret and argument == SECRET_OPTION
    return tuple(shown)


def _masked(given: str) -> str:
    """`NAME=KEY` without the key."""
    name, separator, _ = given.partition("=")
    return f"{name}=***" if separator else "***"


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

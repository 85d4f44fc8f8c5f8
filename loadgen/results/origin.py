"""Where a result comes from: the machine, the versions, the command."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("djinn", "httpx", "numpy", "torch", "transformers")
"""Whose versions decide about figures; those of a server in an environment of its own are not among them."""

SECRET_OPTION = "--api-key"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the load generator ran on. `cpus` is how many it may use."""

    processor: str
    cpus: int
    memory_bytes: int
    platform: str
    python: str

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.processor}, {self.cpus} CPUs, {memory}, {self.platform}, Python {self.python}"


def machine() -> Machine:
    """This machine."""
    return Machine(
        processor=_processor(),
        cpus=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        platform=platform.platform(),
        python=platform.python_version(),
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


def _processor() -> str:
    """Such as "AMD EPYC"; the machine type where the kernel does not tell."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.machine()

"""Versions of what decides about results and speed, beside those that Djinn asks for."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from app.doctor.findings import Finding, error, ok

TORCH = "torch"
TRITON = "triton"
PACKAGES = (TORCH, TRITON, "transformers")
NEEDED_BY = ("djinn-server", TORCH)
"""PyTorch asks for its own version of Triton."""


@dataclass(frozen=True, slots=True)
class Package:
    """installed: None if it is not. required: such as ">=2.11,<3"; None if nothing that is installed asks for it."""

    installed: str | None
    required: str | None


@dataclass(frozen=True, slots=True)
class Versions:
    """packages: by name."""

    python: str
    djinn: str | None
    packages: dict[str, Package]


def read_versions() -> Versions:
    """From the metadata of what is installed; Djinn itself may run from its source alone."""
    required = _requirements()
    return Versions(
        python=platform.python_version(),
        djinn=_version("djinn-server"),
        packages={name: Package(_version(name), required.get(name)) for name in PACKAGES},
    )


def _requirements() -> dict[str, str]:
    found = {}
    for needer in filter(_version, NEEDED_BY):
        for line in requires(needer) or ():
            requirement = Requirement(line)
            if requirement.name in PACKAGES and (requirement.marker is None or requirement.marker.evaluate()):
                found[requirement.name] = str(requirement.specifier)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_versions(versions: Versions, torch_cuda: str | None, device: str) -> list[Finding]:
    """One line each. `torch_cuda`: the version of CUDA that PyTorch is built for."""
    djinn = "Djinn from source" if versions.djinn is None else f"Djinn {versions.djinn}"
    torch_note = "without CUDA" if torch_cuda is None else f"for CUDA {torch_cuda}"
    return [
        ok("python", f"{versions.python}, {djinn}"),
        *(
            _check(name, package, torch_note if name == TORCH else "", device)
            for name, package in versions.packages.items()
        ),
    ]


def _check(name: str, package: Package, note: str, device: str) -> Finding:
    if package.installed is None:
        if name == TRITON and device == "cpu":
            return ok(name, "not installed, and not needed on a CPU")
        return error(name, "not installed", f"pip install '{name}{package.required or ''}'")
    summary = ", ".join(filter(None, (package.installed, note)))
    if package.required and not Requirement(name + package.required).specifier.contains(package.installed, True):
        return error(name, f"{summary}; needed is {package.required}", f"pip install '{name}{package.required}'")
    return ok(name, summary)

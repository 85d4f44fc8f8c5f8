"""GuideLLM in a virtual environment of its own: its pins must not meet Djinn's."""

from loadgen.processes.environment import TORCH, Environment, has_stamp, write_stamp
from loadgen.processes.folders import peers_folder

GUIDELLM = "guidellm"
VERSION = "0.8.1"
PACKAGES = (GUIDELLM, "httpx", "torch", "transformers")


def guidellm_environment() -> Environment:
    """Where it is, or will be."""
    return Environment(peers_folder() / GUIDELLM)


def ensure_guidellm(environment: Environment) -> None:
    """Make the environment unless it is complete. Raises LoadgenError where pip fails."""
    if has_stamp(environment.folder, VERSION):
        return
    environment.make()
    # First, and named again: GuideLLM alone would bring the CUDA build along, for its data loader.
    environment.pip("install", TORCH)
    environment.pip("install", TORCH, f"{GUIDELLM}=={VERSION}")
    write_stamp(environment.folder, VERSION)


def versions(environment: Environment) -> dict[str, str]:
    """Of what decides about its measuring, by package."""
    return {name: environment.find(name).version for name in PACKAGES}

"""DeepSpeed: no server, but a library that a program of the load generator's runs a model with."""

from dataclasses import dataclass

from loadgen.peers.base import Say
from loadgen.processes.environment import TORCH, Environment, has_stamp, write_stamp
from loadgen.processes.folders import peers_folder

DEEPSPEED = "deepspeed==0.19.8"
REQUIREMENTS = (TORCH, "transformers", "accelerate", "setuptools", "wheel", "ninja")
"""All that DeepSpeed's own setup imports, and what compiles its extensions when it runs."""


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """An environment of its own: its setup wants to see PyTorch, which an isolated build does not have."""

    name: str = "deepspeed"

    @property
    def environment(self) -> Environment:
        """Where it is."""
        return Environment(peers_folder() / self.name)

    def is_installed(self) -> bool:
        return has_stamp(self.environment.folder, DEEPSPEED)

    def install(self, say: Say) -> None:
        if self.is_installed():
            return
        say("DeepSpeed's environment: some minutes the first time")
        environment = self.environment
        environment.make()
        environment.install_as_here(*REQUIREMENTS)
        environment.pip("install", "--no-build-isolation", DEEPSPEED)
        write_stamp(environment.folder, DEEPSPEED)

    def versions(self) -> dict[str, str]:
        return {name: self.environment.find(name).version for name in ("deepspeed", "torch", "transformers")}

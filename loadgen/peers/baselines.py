"""Transformers' `generate` behind a small server of ours: in one process, and in Ray actors."""

import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from loadgen.peers.base import SERVED_NAME, Say, ServerSettings
from loadgen.peers.dtype_choice import choose_dtype
from loadgen.processes.environment import TORCH, Environment, has_stamp, write_stamp
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import ROOT, Launch, flatten

RAY = "ray==2.60.0"
RAY_VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default actors give way to everything else, the load generator included
}
RAY_REQUIREMENTS = (RAY, TORCH, "transformers", "accelerate", "fastapi", "uvicorn")
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class TransformersPeer:
    """Stateless: every turn computes its whole history, in static batches. Its KV lasts as long as a batch."""

    name: str = "transformers"
    served_model: str = SERVED_NAME

    def is_installed(self) -> bool:
        """Always: Djinn needs all of it."""
        return True

    def install(self, say: Say) -> None:
        """Nothing is left to do."""
        say("Transformers is part of Djinn's own environment")

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        return _launch(Path(sys.executable), settings, port)

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in PACKAGES}


@dataclass(frozen=True, slots=True)
class RayPeer:
    """The same model once in each of `actors` Ray actors, which own a logical GPU and their share of the cores each."""

    name: str = "ray"
    actors: int = 2
    served_model: str = SERVED_NAME

    def is_installed(self) -> bool:
        return has_stamp(_environment().folder, RAY)

    def install(self, say: Say) -> None:
        if self.is_installed():
            return
        say("Ray's environment: some minutes the first time")
        environment = _environment()
        environment.make()
        environment.install_as_here(*RAY_REQUIREMENTS)
        write_stamp(environment.folder, RAY)

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        base = _launch(_environment().python, settings, port)
        return Launch([*base.command, "--actors", str(self.actors)], RAY_VARIABLES, base.calibration)

    def versions(self) -> dict[str, str]:
        return {name: _environment().find(name).version for name in ("ray", *PACKAGES)}


def _environment() -> Environment:
    return Environment(peers_folder() / "ray")


def _launch(python: Path, settings: ServerSettings, port: int) -> Launch:
    choice = choose_dtype(settings)
    flags = {
        "--model": str(settings.model),
        "--served-name": SERVED_NAME,
        "--dtype": choice.dtype,
        "--port": str(port),
        "--threads": str(len(settings.cores)),
    }
    return Launch([str(python), "-m", "loadgen.rivals.baseline", *flatten(flags)], calibration=choice.calibration)

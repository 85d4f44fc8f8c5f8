"""Transformers' `generate` behind a small server of ours."""

import sys
from dataclasses import dataclass
from importlib.metadata import version

from loadgen.peers.base import SERVED_NAME, Say, ServerSettings
from loadgen.peers.dtype_choice import choose_dtype
from loadgen.processes.launch import Launch, flatten

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
        choice = choose_dtype(settings)
        flags = {
            "--model": str(settings.model),
            "--served-name": SERVED_NAME,
            "--dtype": choice.dtype,
            "--port": str(port),
            "--threads": str(len(settings.cores)),
        }
        return Launch(
            [sys.executable, "-m", "loadgen.rivals.baseline", *flatten(flags)], calibration=choice.calibration
        )

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in PACKAGES}

"""Djinn itself, of this checkout, with one of its KV policies."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from loadgen.peers.base import SERVED_NAME, Say, ServerSettings
from loadgen.processes.launch import Launch, flatten

PACKAGES = ("djinn", "torch", "transformers", "numba", "numpy")


def djinn_launch(flags: dict[str, str]) -> Launch:
    """`djinn serve` of this interpreter."""
    return Launch([sys.executable, "-m", "app", "serve", *flatten(flags)])


@dataclass(frozen=True, slots=True)
class DjinnPeer:
    """Djinn with its defaults but for `policy` and `flags`, and in no state folder that an operator uses."""

    name: str
    policy: str
    flags: Mapping[str, str] = field(default_factory=dict)
    served_model: None = None

    def is_installed(self) -> bool:
        """Always: it is part of the checkout."""
        return True

    def install(self, say: Say) -> None:
        """Nothing is left to do."""
        say("Djinn is part of this checkout")

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        flags = {
            "--model": str(settings.model),
            "--served-name": SERVED_NAME,
            "--dtype": settings.dtype,
            "--port": str(port),
            "--kv-policy": self.policy,
            "--state-dir": "none" if settings.state is None else str(settings.state),
        }
        if settings.kv_tokens is not None:
            flags["--kv-device"] = f"1x{settings.kv_tokens}"
        return djinn_launch({**flags, **self.flags})

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in PACKAGES}

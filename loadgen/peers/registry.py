"""Every peer by its name, and Transformers' `generate` behind a small server of ours, which is one of them."""

import sys
from dataclasses import dataclass
from importlib.metadata import version

from loadgen.errors import LoadgenError
from loadgen.peers.base import SERVED_NAME, Peer, Say, ServerSettings, choose_dtype
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.llamacpp import LlamaCppPeer
from loadgen.peers.vllm import VllmPeer
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


OFFLOAD_GIB = 16

PEERS: tuple[Peer, ...] = (
    DjinnPeer("djinn", policy="signal"),
    DjinnPeer("djinn+lru", policy="lru"),
    DjinnPeer("djinn+none", policy="none"),
    DjinnPeer("djinn+tools", policy="signal", tools=True, signals=False),
    DjinnPeer("djinn+tools+signals", policy="signal", tools=True),
    VllmPeer("vllm"),
    VllmPeer("vllm+offload", offload_gib=OFFLOAD_GIB),
    LlamaCppPeer(),
    TransformersPeer(),
)


def find_peer(name: str) -> Peer:
    """The peer of that name. Raises `LoadgenError`, which lists the names there are."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise LoadgenError(f"there is no peer {name!r}, only {', '.join(peer.name for peer in PEERS)}")

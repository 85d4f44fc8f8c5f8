"""Every peer by its name."""

from collections.abc import Sequence

from loadgen.errors import LoadgenError
from loadgen.peers.base import Installable, Peer
from loadgen.peers.baselines import RayPeer, TransformersPeer
from loadgen.peers.deepspeed import DeepSpeed
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.llamacpp import LlamaCppPeer
from loadgen.peers.vllm import VllmPeer

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
    RayPeer(),
)

LIBRARIES: tuple[Installable, ...] = (DeepSpeed(),)
"""No servers: an experiment runs a program in their environments."""


def find_peer(name: str) -> Peer:
    """The peer of that name. Raises `LoadgenError`, which lists the names there are."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    if name in (library.name for library in LIBRARIES):
        raise LoadgenError(f"{name} is a library without a server: it can be installed, but not started or measured")
    raise LoadgenError(f"there is no peer {name!r}, only {_names(PEERS)}; {_names(LIBRARIES)} can only be installed")


def find_installable(name: str) -> Installable:
    """The peer or library of that name. Raises `LoadgenError` as `find_peer` does."""
    found = next((library for library in LIBRARIES if library.name == name), None)
    return found or find_peer(name)


def _names(peers: Sequence[Installable]) -> str:
    return ", ".join(peer.name for peer in peers)

"""Every peer by its name."""

from loadgen.errors import LoadgenError
from loadgen.peers.base import Peer
from loadgen.peers.baselines import TransformersPeer
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
)


def find_peer(name: str) -> Peer:
    """The peer of that name. Raises `LoadgenError`, which lists the names there are."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise LoadgenError(f"there is no peer {name!r}, only {', '.join(peer.name for peer in PEERS)}")

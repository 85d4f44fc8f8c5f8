"""Who takes part, and how each is started in its strongest configuration. docs/benchmarks.md tells what was tried."""

import sys

from loadgen.peers.base import ServerSettings
from loadgen.peers.dtype_choice import AUTO, choose_dtype
from loadgen.peers.registry import find_peer
from loadgen.processes.launch import Launch

DJINN, VLLM, TRANSFORMERS = "djinn", "vllm", "transformers"
PEERS = (DJINN, VLLM, TRANSFORMERS)
DTYPES = ("float32", "bfloat16")


def default_dtypes() -> tuple[str, ...]:
    """Those of `DTYPES` in which a peer may be at its best on this machine."""
    return tuple(dict.fromkeys(("float32", choose_dtype(AUTO))))


def launch(peer: str, settings: ServerSettings, port: int) -> Launch:
    """How the peer is started. That of Transformers is no server, and listens on no port."""
    if peer == TRANSFORMERS:
        return Launch([sys.executable, "-m", "benchmarks.peers.generate_worker", str(settings.model), settings.dtype])
    return find_peer(peer).launch(settings, port)

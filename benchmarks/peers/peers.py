"""The servers to compare, each in its strongest configuration (docs/reference/benchmarks.md)."""

import sys

from loadgen.peers.base import ServerSettings
from loadgen.peers.dtype_choice import choose_dtype
from loadgen.peers.dtypes import AUTO
from loadgen.peers.registry import find_peer
from loadgen.processes.launch import Launch

DJINN, VLLM, LLAMACPP, TRANSFORMERS = "djinn", "vllm", "llamacpp", "transformers"
PEERS = (DJINN, VLLM, LLAMACPP, TRANSFORMERS)
DTYPES = (AUTO, "float32", "bfloat16")
"""`auto`: each peer in its best type."""


def launch(peer: str, settings: ServerSettings, port: int) -> Launch:
    """How the peer is started. That of Transformers is no server, and listens on no port."""
    if peer == TRANSFORMERS:
        choice = choose_dtype(settings)
        worker = [sys.executable, "-m", "benchmarks.peers.generate_worker", str(settings.model), choice.dtype]
        return Launch(worker, calibration=choice.calibration)
    return find_peer(peer).launch(settings, port)

"""llama.cpp's server: continuous batching, flash attention, and every cache for prompts that it has."""

from dataclasses import dataclass

from loadgen.peers.base import SERVED_NAME, Say, ServerSettings
from loadgen.peers.gguf import gguf_file
from loadgen.peers.llamacpp_source import PACKAGE, VERSION, LlamaCppSource
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import Launch, flatten

HOST_CACHE_MIB = 8192
"""Host memory for prompts that are not in a slot: llama.cpp's default, more than eighty agents need."""
SLOTS = 8
"""Of a server that is not told how much KV there is, or how long conversations become."""


@dataclass(frozen=True, slots=True)
class LlamaCppPeer:
    """llama.cpp's server: each slot has its part of the KV for itself, where it is known to be enough for it.

    In one buffer for all, every token of every slot attends over all of it, masked: half the tokens/s with 11 slots.
    """

    name: str = "llamacpp"
    served_model: str = SERVED_NAME

    def is_installed(self) -> bool:
        return _source().server.exists()

    def install(self, say: Say) -> None:
        if self.is_installed():
            return
        say("fetching llama.cpp's source")
        _source().fetch()
        say("building llama.cpp's server: some ten minutes on two cores")
        _source().build()

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        """See `Peer`. Converts the model the first time."""
        threads = str(len(settings.cores))
        kv_type = "f32" if settings.dtype == "float32" else "f16"
        flags = {
            "--model": str(gguf_file(_source(), settings.model, settings.dtype)),
            "--alias": SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--threads": threads,
            "--parallel": str(_fitting_slots(settings) or SLOTS),
            "--cache-type-k": kv_type,
            "--cache-type-v": kv_type,
            "--flash-attn": "on",
            "--cache-ram": str(HOST_CACHE_MIB),
        }
        if settings.kv_tokens is not None:
            flags["--ctx-size"] = str(settings.kv_tokens)
        buffers = "--kv-unified" if _fitting_slots(settings) is None else "--no-kv-unified"
        return Launch([str(_source().server), *flatten(flags), buffers, "--metrics"])

    def versions(self) -> dict[str, str]:
        return {PACKAGE: VERSION}


def _fitting_slots(settings: ServerSettings) -> int | None:
    """As many as never need more KV than there is: llama.cpp fails every running request when it runs out.

    None where the server is not told how much there is, or how long conversations become.
    """
    if settings.kv_tokens is None or settings.context_tokens is None:
        return None
    return max(1, settings.kv_tokens // settings.context_tokens)


def _source() -> LlamaCppSource:
    return LlamaCppSource(peers_folder() / "llamacpp" / VERSION)

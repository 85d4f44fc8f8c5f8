"""How each server is started: the same model, data type and KV memory, everything else at its best."""

from pathlib import Path

from benchmarks.launch import Launch, djinn_launch
from benchmarks.peers.peers import SERVED_NAME, vllm_launch
from benchmarks.peers.vllm_environment import VLLM_ENVIRONMENT

SESSIONS, TOKENS = 20, 1024
"""The device's KV memory, in sessions of so many tokens."""
VLLM_BLOCK_TOKENS = 128
"""vLLM's block size on CPUs."""
POLICIES = ("signal", "lru", "none")
VLLM = "vllm"


def launch(server: str, model: Path, dtype: str, port: int, cores: list[int]) -> Launch:
    """The launch of `server`: a policy of Djinn's, or vLLM, whose prefix caching is on."""
    if server == VLLM:
        base = vllm_launch(VLLM_ENVIRONMENT, model, dtype, port, cores)
        blocks = SESSIONS * TOKENS // VLLM_BLOCK_TOKENS
        return Launch([*base.command, "--num-gpu-blocks-override", str(blocks)], base.environment)
    flags = {"--model": str(model), "--served-name": SERVED_NAME, "--dtype": dtype, "--port": str(port)}
    tiers = {"--kv-device": f"{SESSIONS}x{TOKENS}", "--kv-policy": server, "--state-dir": "none"}
    return djinn_launch({**flags, **tiers})


def target(server: str, url: str) -> str:
    """The load generator's name for the server."""
    return f"{server}={url}" + (f"#{SERVED_NAME}" if server == VLLM else "")

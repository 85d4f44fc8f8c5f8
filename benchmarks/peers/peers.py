"""Who takes part, and how each is started in its strongest configuration. docs/benchmarks.md tells what was tried."""

import sys
from pathlib import Path

from benchmarks.launch import Launch, djinn_launch, flatten

DJINN, VLLM, TRANSFORMERS = "djinn", "vllm", "transformers"
PEERS = (DJINN, VLLM, TRANSFORMERS)
DTYPES = ("float32", "bfloat16")
SERVED_NAME = "model"


def djinn_peer_launch(model: Path, dtype: str, port: int) -> Launch:
    """Djinn, with its defaults, in no folder that an operator's own server may use."""
    flags = {"--model": str(model), "--served-name": SERVED_NAME, "--dtype": dtype, "--port": str(port)}
    return djinn_launch({**flags, "--state-dir": "none"})


def vllm_launch(virtual_environment: Path, model: Path, dtype: str, port: int, cores: list[int]) -> Launch:
    """vLLM: prefix caching, chunked prefill and compilation are its defaults and stay on."""
    flags = {
        "--model": str(model),
        "--served-model-name": SERVED_NAME,
        "--dtype": dtype,
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    intel_openmp = virtual_environment / "lib" / "libiomp5.so"
    if intel_openmp.exists():
        environment["LD_PRELOAD"] = str(intel_openmp)
    python = virtual_environment / "bin" / "python"
    return Launch([str(python), "-m", "vllm.entrypoints.openai.api_server", *flatten(flags)], environment)


def transformers_launch(model: Path, dtype: str) -> Launch:
    """`generate` in a process of its own, which reads the workload from its standard input."""
    return Launch([sys.executable, "-m", "benchmarks.peers.generate_worker", str(model), dtype])

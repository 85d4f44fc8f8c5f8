"""Who takes part, and how each is started in its strongest configuration. docs/benchmarks.md tells what was tried."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

DJINN, VLLM, TRANSFORMERS = "djinn", "vllm", "transformers"
PEERS = (DJINN, VLLM, TRANSFORMERS)
DTYPES = ("float32", "bfloat16")
SERVED_NAME = "model"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and what it adds to the environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def djinn_launch(model: Path, dtype: str, port: int) -> Launch:
    """Djinn, with its defaults."""
    flags = {"--model": str(model), "--served-name": SERVED_NAME, "--dtype": dtype, "--port": str(port)}
    return Launch([sys.executable, "-m", "app", "serve", *_flatten(flags)])


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
    return Launch([str(python), "-m", "vllm.entrypoints.openai.api_server", *_flatten(flags)], environment)


def transformers_launch(model: Path, dtype: str) -> Launch:
    """`generate` in a process of its own, which reads the workload from its standard input."""
    return Launch([sys.executable, "-m", "benchmarks.peers.generate_worker", str(model), dtype])


def without_folders(launch: Launch, folders: list[Path]) -> Launch:
    """The launch as it may be published: files in `folders` without the place of these folders on this machine."""

    def shorten(text: str) -> str:
        for folder in folders:
            text = text.replace(f"{folder}/", "")
        return text

    environment = {name: shorten(value) for name, value in launch.environment.items()}
    return Launch([shorten(part) for part in launch.command], environment)


def _flatten(flags: dict[str, str]) -> list[str]:
    return [part for pair in flags.items() for part in pair]

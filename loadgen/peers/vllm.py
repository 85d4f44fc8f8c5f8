"""vLLM: prefix caching, chunked prefill and compilation are its defaults and stay on."""

from dataclasses import dataclass

from loadgen.errors import LoadgenError
from loadgen.peers import vllm_environment
from loadgen.peers.base import SERVED_NAME, Say, ServerSettings
from loadgen.peers.cuda import on_cuda
from loadgen.peers.dtype_choice import choose_dtype
from loadgen.processes.environment import Environment
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import Launch, flatten

CPU_BLOCK_TOKENS = 128
CUDA_BLOCK_TOKENS = 16
"""vLLM's default block sizes."""
TELL_CACHED = "--enable-prompt-tokens-details"
"""Without it, usage does not tell how many prompt tokens came from the prefix cache."""
CPU_KV_GIB = "2"
"""Of a server whose KV is not limited to a number of tokens."""


@dataclass(frozen=True, slots=True)
class VllmPeer:
    """vLLM's CPU build, or on a machine with CUDA its usual one. `offload_gib`: host memory for KV, only with CUDA."""

    name: str
    offload_gib: int | None = None
    served_model: str = SERVED_NAME

    def is_installed(self) -> bool:
        usable = self.offload_gib is None or on_cuda()
        return usable and vllm_environment.is_complete(_environment(), cuda=on_cuda())

    def install(self, say: Say) -> None:
        self._require_device()
        say("vLLM's environment: many minutes the first time")
        vllm_environment.ensure_vllm(_environment(), cuda=on_cuda())

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        self._require_device()
        cuda, choice = on_cuda(), choose_dtype(settings)
        flags = {
            "--model": str(settings.model),
            "--served-model-name": SERVED_NAME,
            "--dtype": choice.dtype,
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        if settings.kv_tokens is not None:
            blocks = settings.kv_tokens // (CUDA_BLOCK_TOKENS if cuda else CPU_BLOCK_TOKENS)
            flags["--num-gpu-blocks-override"] = str(blocks)
        if settings.context_tokens is not None:  # vLLM does not start without KV for the longest context that it takes
            flags["--max-model-len"] = str(settings.context_tokens)
        if self.offload_gib is not None:
            flags["--kv-offloading-size"] = str(self.offload_gib)
        server = [str(_environment().python), "-m", "vllm.entrypoints.openai.api_server"]
        return Launch([*server, *flatten(flags), TELL_CACHED], _variables(settings, cuda), choice.calibration)

    def versions(self) -> dict[str, str]:
        environment = _environment()
        packages = [vllm_environment.package(on_cuda()), "torch", "transformers"]
        if not on_cuda():
            packages.append("intel-openmp")
        return {name: environment.find(name).version for name in packages}

    def _require_device(self) -> None:
        if self.offload_gib is not None and not on_cuda():
            raise LoadgenError(f"{self.name} needs CUDA: vLLM moves KV to host memory from no other device")


def _environment() -> Environment:
    return Environment(peers_folder() / "vllm")


def _variables(settings: ServerSettings, cuda: bool) -> dict[str, str]:
    variables = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not cuda:
        variables["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_GIB
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings.cores))
    intel_openmp = _environment().folder / "lib" / "libiomp5.so"
    if intel_openmp.exists():
        variables["LD_PRELOAD"] = str(intel_openmp)
    return variables

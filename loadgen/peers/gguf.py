"""The GGUF file of a Transformers folder: the very weights that the other servers load, in one of llama.cpp's types."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from loadgen.errors import LoadgenError
from loadgen.peers.dtypes import AUTO
from loadgen.peers.llamacpp_source import LlamaCppSource
from loadgen.processes.folders import checkpoint_file, peers_folder

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

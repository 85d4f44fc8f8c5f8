"""GGUF files: what is not weights becomes a Transformers folder once; most files' weights are read in place.

Transformers reads config, tokenizer and chat template. What it would drop in silence is put right here (the SmolLM
pre-tokenizer) or refused (scaled rotary embeddings, missing and unknown tensors).
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from app.domain.errors import UnknownModel
from app.model_store import install
from app.model_store.install import ModelStoreError, install_once, require_free_space
from app.model_store.saved import save
from app.model_store.tensors import index_tensors, is_read_in_place

if TYPE_CHECKING:
    from gguf import GGUFReader

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""`tokenizer.ggml.pre` values for GPT-2's split with every digit alone (llama.cpp, src/llama-vocab.cpp)."""
_PLAIN_GPT2 = frozenset({"", "default", "gpt-2"})


def _convert_tokenizer(source: Path, split: str, folder: Path) -> None:
    """Write it into `folder`, with the pre-tokenizer `split` that the file names: Transformers takes GPT-2's for any
    name it does not know. Raises ValueError if it is not known here either.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizer.backend_tokenizer
    if split in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and split not in _PLAIN_GPT2:
        raise ValueError(f"its pre-tokenizer {split!r} is not known here; use the model's Transformers folder")
    tokenizer.save_pretrained(folder)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, tokenizer and chat template of `source` into `folder`, and where its tensors are.

    Of a file whose tensors cannot be kept as they are, write float32 safetensors instead: 8 bytes of memory and 4 of
    disk per parameter. Raises StoreFull if the disk lacks them, and ModelStoreError if the file is broken or of a kind
    whose model would answer differently.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        architecture = _text_field(reader, "general.architecture")
        _refuse_scaled_rope(reader, architecture)
        _check_layers(reader, architecture)
        _convert_tokenizer(source, _text_field(reader, "tokenizer.ggml.pre"), folder)
        if not _index_in_place(reader, architecture, source, folder):
            require_free_space(folder, 4 * sum(int(tensor.n_elements) for tensor in reader.tensors))
            window = _number_field(reader, "phi3.attention.sliding_window")
            _convert_weights(source, folder, window if architecture == "phi3" else 0)
    except ModelStoreError:
        raise
    except Exception as error:  # what Transformers raises for wrong metadata has no common kind
        raise ModelStoreError(f"the conversion of {source.name} failed: {error}") from error


def _index_in_place(reader: GGUFReader, architecture: str, source: Path, folder: Path) -> bool:
    """Write the config, and all that a start needs, if the file's tensors can be kept as they are; returns whether."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    if not is_read_in_place(reader, architecture, config.model_type):
        return False
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # tied ones once
    index_tensors(reader, source, config, shapes).write(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save(folder)
    return True


def _convert_weights(source: Path, folder: Path, window: int) -> None:
    """`window` is that of all layers, which Transformers does not read; 0: as it reads the file."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with _no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        model, report = loaded
        if report["missing_keys"]:
            raise ValueError(f"it lacks {', '.join(sorted(report['missing_keys'])[:5])}")
        if window:
            model.config.sliding_window = window
        model.save_pretrained(folder)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Within this context Transformers draws none: the caller has said in words what takes time."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    reader: Any = modeling_gguf_pytorch_utils
    shown, draw = logging.is_progress_bar_enabled(), reader.tqdm
    logging.disable_progress_bar()
    reader.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        reader.tqdm = draw
        if shown:
            logging.enable_progress_bar()


def _refuse_scaled_rope(reader: GGUFReader, architecture: str) -> None:
    """Transformers reads no rotary scaling from a GGUF file, nor how much of a head is rotated: a Llama 3.1 or a
    Phi-4-mini would go wrong without a word. The tensors are `rope_freqs`, `rope_factors_long` and `_short`.
    """
    scaled = _text_field(reader, f"{architecture}.rope.scaling.type") not in ("", "none")
    if scaled or any(tensor.name.startswith("rope_f") for tensor in reader.tensors):
        raise ValueError("its rotary embedding is scaled, which is lost in conversion; use its Transformers folder")
    names = ("rope.dimension_count", "embedding_length", "attention.head_count")
    rotated, width, heads = (_number_field(reader, f"{architecture}.{name}") for name in names)
    if architecture == "phi3" and rotated and heads and rotated != width // heads:
        raise ValueError("its heads are rotated in part, which is lost in conversion; use its Transformers folder")


def _check_layers(reader: GGUFReader, architecture: str) -> None:
    """Raise ValueError for more layers than the file has tensors. Each has several, and the model is built of them."""
    layers = _field(reader, f"{architecture}.block_count", 0)
    if not isinstance(layers, int) or layers > len(reader.tensors):
        raise ValueError(f"{architecture}.block_count is {layers!r}; the file has {len(reader.tensors)} tensors")


def _number_field(reader: GGUFReader, name: str) -> int:
    """A whole number of the file's metadata, or 0 if it is not there."""
    found = _field(reader, name, 0)
    if not isinstance(found, int):
        raise ValueError(f"{name} is no whole number")
    return found


def _text_field(reader: GGUFReader, name: str) -> str:
    """A string of the file's metadata, or "" if it is not there."""
    found = _field(reader, name, "")
    if not isinstance(found, str):
        raise ValueError(f"{name} is no string")
    return found


def _field(reader: GGUFReader, name: str, absent: object) -> object:
    field: Any = reader.get_field(name)
    return absent if field is None else field.contents()


_FAILED = 3
"""The status of a process that has said on its last line what went wrong."""


def convert_apart(source: Path, folder: Path) -> None:
    """As `convert_gguf`, with the same errors. A server would keep the 400 MB that PyTorch and Transformers take; a
    process that has PyTorch loaded already converts the file itself, which saves seconds.
    """
    if "torch" in sys.modules:
        convert_gguf(source, folder)
        return
    command = [sys.executable, "-P", "-m", "app.model_store.gguf", str(source), str(folder)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if ended.returncode == _FAILED:
        kind, message = orjson.loads(ended.stdout.splitlines()[-1])
        raise getattr(install, kind)(message)
    if ended.returncode:
        raise ModelStoreError(
            f"the conversion of {source.name} ended with status {ended.returncode}; memory may have been too short"
        )


def _main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that asked tells of a Ctrl-C
    try:
        convert_gguf(*map(Path, sys.argv[1:]))
    except ModelStoreError as error:
        print("\n", orjson.dumps((type(error).__name__, error.message)).decode(), sep="")
        return _FAILED
    return 0


_FORM = 4
"""Of the folders, so that one of another form is never read."""


def cached_gguf(path: Path, cache_dir: Path) -> Path:
    """The folder of the GGUF file at `path`, which refers to it; made if it is not in the cache yet.

    The cache is keyed by place, size and time of change, so that starting again does not read the whole file.
    Raises UnknownModel if there is no such file, and ModelStoreError.
    """
    source = path.expanduser().resolve()
    if not source.is_file():
        raise UnknownModel(f"there is no GGUF file {path}", param="model")
    state = source.stat()
    folder = gguf_folder(cache_dir, source.stem, f"{source}\0{state.st_size}\0{state.st_mtime_ns}")
    install_once(folder, lambda scratch: convert_apart(source, scratch))
    return folder


def gguf_folder(cache_dir: Path, name: str, identity: str) -> Path:
    """Where the folder of a GGUF file is, once it is made. `identity` tells files of the same name apart."""
    key = hashlib.sha256(f"{_FORM}\0{identity}".encode()).hexdigest()[:12]
    return cache_dir.expanduser() / "gguf" / f"{name}-{key}"


if __name__ == "__main__":
    sys.exit(_main())

"""GGUF files: what is not weights becomes a Transformers folder once; most files' weights are read in place.

Transformers reads tokenizer and chat template, and most configs. What it would drop in silence is put right, here and
in `gguf_families`, or refused (missing and unknown tensors, unknown ways to scale rotary embeddings).
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from app.domain.errors import UnknownModel
from app.model_store import install
from app.model_store.gguf_families import FAMILIES, GgufModel, config_of, index_tensors, is_read_in_place, shards_of
from app.model_store.install import ModelStoreError, install_once, require_free_space
from app.model_store.saved import save

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""`tokenizer.ggml.pre` values for GPT-2's split with every digit alone (llama.cpp, src/llama-vocab.cpp)."""
_PLAIN_GPT2 = frozenset({"", "default", "gpt-2"})


def _convert_tokenizer(model: GgufModel, folder: Path) -> None:
    """Write it into `folder`, with the pre-tokenizer that the file names: Transformers takes GPT-2's for any name it
    does not know. Raises ValueError if it is not known here either.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    family, split = FAMILIES.get(model.architecture), model.text("tokenizer.ggml.pre")
    automatic: Any = AutoTokenizer if family is None or family.reads else PreTrainedTokenizerFast
    tokenizer = automatic.from_pretrained(model.files[0].parent, gguf_file=model.files[0].name)
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
    try:
        model = GgufModel(source)
        _check_layers(model)
        config = config_of(model)
        _convert_tokenizer(model, folder)
        if is_read_in_place(model, config.model_type):
            _index(model, config, folder)
        else:
            _refuse_lost(model)
            require_free_space(folder, 4 * sum(int(tensor.n_elements) for _, tensor in model.tensors.values()))
            _convert_weights(source, folder)
    except ModelStoreError:
        raise
    except Exception as error:  # what Transformers raises for wrong metadata has no common kind
        raise ModelStoreError(f"the conversion of {source.name} failed: {error}") from error


def _index(model: GgufModel, config: Any, folder: Path) -> None:
    """Write the config, all that a start needs, and where the file's tensors are."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        modules: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in modules.named_parameters()}  # tied ones once
    index_tensors(model, config, shapes).write(folder)
    modules.config.architectures = [type(modules).__name__]
    modules.config.save_pretrained(folder)
    modules.generation_config.save_pretrained(folder)
    save(folder)


def _convert_weights(source: Path, folder: Path) -> None:
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


def _refuse_lost(model: GgufModel) -> None:
    """Raise ValueError for what Transformers does not read of a file: rotary scaling, and further files."""
    scaled = model.text(".rope.scaling.type") not in ("", "none")
    if scaled or any(name.startswith("rope_f") for name in model.tensors):
        raise ValueError("its rotary embedding is scaled, which is lost in conversion; use its Transformers folder")
    if len(model.files) > 1:
        raise ValueError(f"its architecture {model.architecture!r} is converted, and only from a single file")


def _check_layers(model: GgufModel) -> None:
    """Raise ValueError for more layers than the file has tensors. Each has several, and the model is built of them."""
    layers = model.get(".block_count", 0)
    if not isinstance(layers, int) or layers > len(model.tensors):
        raise ValueError(f"{model.architecture}.block_count is {layers!r}; the file has {len(model.tensors)} tensors")


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


_FORM = 5
"""Of the folders, so that one of another form is never read."""


def cached_gguf(path: Path, cache_dir: Path) -> Path:
    """The folder of the GGUF file at `path`, which refers to it; made if it is not in the cache yet.

    Of a model in several files `path` is any. The cache is keyed by place, size and time of change, so that starting
    again does not read the whole file.
    Raises UnknownModel if there is no such file, and ModelStoreError.
    """
    source = path.expanduser().resolve()
    if not source.is_file():
        raise UnknownModel(f"there is no GGUF file {path}", param="model")
    try:
        files = shards_of(source)
    except ValueError as error:
        raise UnknownModel(f"{path}: {error}", param="model") from error
    states = [(each, each.stat()) for each in files]
    identity = "\0".join(f"{each}\0{state.st_size}\0{state.st_mtime_ns}" for each, state in states)
    folder = gguf_folder(cache_dir, files[0].stem, identity)
    install_once(folder, lambda scratch: convert_apart(source, scratch))
    return folder


def gguf_folder(cache_dir: Path, name: str, identity: str) -> Path:
    """Where the folder of a GGUF file is, once it is made. `identity` tells files of the same name apart."""
    key = hashlib.sha256(f"{_FORM}\0{identity}".encode()).hexdigest()[:12]
    return cache_dir.expanduser() / "gguf" / f"{name}-{key}"


if __name__ == "__main__":
    sys.exit(_main())

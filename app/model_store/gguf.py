"""GGUF files: converted once into a Transformers folder, by Transformers' own reader.

Weights are dequantised to float32, which holds every GGUF type without loss. What the reader would drop in
silence is put right here (the SmolLM pre-tokenizer) or refused (scaled rotary embeddings, missing tensors).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.domain.errors import UnknownModel
from app.model_store.errors import ConversionFailed
from app.model_store.install import install_once, require_free_space

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""`tokenizer.ggml.pre` values for GPT-2's split with every digit alone (llama.cpp, src/llama-vocab.cpp)."""
_PLAIN_GPT2 = frozenset({"", "default", "gpt-2"})


def cached_gguf(path: Path, cache_dir: Path) -> Path:
    """The Transformers folder of the GGUF file at `path`, converted if it is not in the cache yet.

    The cache is keyed by place, size and time of change, so that starting again does not read the whole file.
    Raises UnknownModel if there is no such file, ConversionFailed or StoreFull.
    """
    source = path.expanduser().resolve()
    if not source.is_file():
        raise UnknownModel(f"there is no GGUF file {path}", param="model")
    state = source.stat()
    key = hashlib.sha256(f"{source}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_dir.expanduser() / "gguf" / f"{source.stem}-{key}"
    install_once(folder, lambda scratch: convert_gguf(source, scratch))
    return folder


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and float32 safetensors of `source` into `folder`.

    Needs about 8 bytes of memory and 4 of disk per parameter. Raises StoreFull if the disk lacks them, and
    ConversionFailed if the file is broken or of a kind whose converted model would answer differently.
    """
    from gguf import GGUFReader
    from safetensors import SafetensorError

    try:
        reader = GGUFReader(source)
        require_free_space(folder, 4 * sum(int(tensor.n_elements) for tensor in reader.tensors))
        _refuse_scaled_rope(reader)
        _convert_tokenizer(source, _text_field(reader, "tokenizer.ggml.pre"), folder)
        _convert_weights(source, folder)
    except (ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise ConversionFailed(f"the conversion of {source.name} failed: {error}") from error


def _convert_tokenizer(source: Path, split: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _set_split(tokenizer, split)
    tokenizer.save_pretrained(folder)


def _set_split(tokenizer: PreTrainedTokenizerFast, split: str) -> None:
    """Set the pre-tokenizer that the file names; Transformers takes GPT-2's for any name it does not know."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizer.backend_tokenizer
    if split in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and split not in _PLAIN_GPT2:
        raise ValueError(f"its pre-tokenizer {split!r} is not known here; use the model's Transformers folder")


def _convert_weights(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

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


def _refuse_scaled_rope(reader: GGUFReader) -> None:
    """Transformers reads no rotary scaling from a GGUF file: a Llama 3.1 would go wrong without a word."""
    architecture = _text_field(reader, "general.architecture")
    scaled = _text_field(reader, f"{architecture}.rope.scaling.type") not in ("", "none")
    if scaled or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ValueError("its rotary embedding is scaled, which is lost in conversion; use its Transformers folder")


def _text_field(reader: GGUFReader, name: str) -> str:
    """A string of the file's metadata, or "" if it is not there."""
    field: Any = reader.get_field(name)
    return "" if field is None else str(field.contents())

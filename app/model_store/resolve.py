"""From what the operator wrote after `--model` to a config, a folder of weights, a tokenizer and the ends of turns."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from app.domain.errors import UnknownModel
from app.domain.values import NEUTRAL, SamplingDefaults, WeightsDtype
from app.model_store.gguf import cached_gguf
from app.model_store.install import BrokenModel
from app.model_store.pull import CATALOG, download_from_hub, pull_model
from app.model_store.saved import Config, ModelTokenizer, is_saved, read_config, read_tokenizer
from app.model_store.shapes import SHAPE_NAMES, byte_tokenizer, shape_config
from app.model_store.tensors import weight_files

_RANDOM = "random:"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to load: `folder` holds weights and tokenizer; None: random weights from `seed`."""

    name: str
    config: Config
    folder: Path | None
    seed: int
    weights_dtype: WeightsDtype = WeightsDtype.CHECKPOINT
    sampling: SamplingDefaults = NEUTRAL
    """What the catalogue recommends; the folder may say more."""


def resolve(
    spec: str, *, cache_dir: Path, seed: int = 0, weights_dtype: WeightsDtype = WeightsDtype.CHECKPOINT
) -> ResolvedModel:
    """Find, and if need be fetch and convert, the model that `spec` names. Its matrices are kept as `weights_dtype`.

    `spec` is, in this order: `random:SHAPE`, a catalogue name, a `.gguf` file, a local Transformers folder, a hub
    id `org/name`. Progress goes to stderr. Raises UnknownModel if it is none of these, ModelStoreError if the
    model cannot be fetched, converted or read.
    """
    if spec.startswith(_RANDOM):
        shape = spec.removeprefix(_RANDOM)
        return ResolvedModel(shape, shape_config(shape), None, seed, weights_dtype)
    name, folder = _find(spec, cache_dir)
    sampling = CATALOG[spec].sampling if spec in CATALOG else NEUTRAL
    return ResolvedModel(name, _read_config(folder), folder, seed, weights_dtype, sampling)


def _find(spec: str, cache_dir: Path) -> tuple[str, Path]:
    """The name and the folder of a model with real weights."""
    path = Path(spec).expanduser()
    if spec in CATALOG:
        return spec, pull_model(CATALOG[spec], cache_dir, Console(stderr=True))
    if path.suffix == ".gguf":
        return path.stem, cached_gguf(path, cache_dir)
    if spec and path.is_dir():
        return path.resolve().name, path.resolve()
    if _HUB_ID.fullmatch(spec):
        return spec.split("/")[1], download_from_hub(spec)
    known = ", ".join([*CATALOG, *(f"{_RANDOM}{shape}" for shape in SHAPE_NAMES)])
    raise UnknownModel(
        f"no model {spec!r}; use a Transformers folder, a .gguf file, a hub id org/name, or one of: {known}",
        param="model",
    )


def _read_config(folder: Path) -> Config:
    if not weight_files(folder):
        raise BrokenModel(f"{folder} holds no .safetensors weights")
    if is_saved(folder):
        return read_config(folder)
    from transformers import AutoConfig, PretrainedConfig

    try:
        stated, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
        if not isinstance(found := stated.get("quantization_config"), dict | None):
            raise ValueError(f"quantization_config must be an object; got {found!r}")
        config: Config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a library trips over, it is this file that cannot be read
        why = " ".join(str(error).split())
        raise BrokenModel(f"Transformers cannot read config.json in {folder}: {why}", param="model") from error
    return config


SAMPLES = 1024
SAMPLE_BYTES = 4096
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype")
"""Entries of a config that say where a model came from and how it was loaded."""

ROUNDED = (WeightsDtype.BFLOAT16, WeightsDtype.INT8, WeightsDtype.FLOAT8)
"""Matrices may have other values than in the checkpoint."""


def fingerprint(model: ResolvedModel) -> str:
    """Digest of the model's shape, of a sample of its weights, and of how matrices are rounded; the same wherever the
    same files lie.

    The sample is the size of each weight file and `SAMPLES` places in it, evenly spread: a tensor of a thousandth of
    the file that differs is seen. Reading whole checkpoints would take longer than loading them.
    """
    shape = {name: value for name, value in model.config.to_dict().items() if name not in NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode())
    if model.folder is None:
        digest.update(f"random {model.seed}".encode())
    else:
        for path in weight_files(model.folder):
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{path.name} {size}".encode())
                for sample in range(SAMPLES):
                    file.seek(sample * size // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    if model.weights_dtype in ROUNDED:
        digest.update(f"matrices as {model.weights_dtype}".encode())
    return digest.hexdigest()


def read_generation(model: ResolvedModel) -> tuple[Path, dict[str, Any]] | None:
    """The model's generation_config.json and its entries; None if it has none. Raises BrokenModel for a file that
    cannot be read.
    """
    path = None if model.folder is None else model.folder / "generation_config.json"
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"cannot read {path}: {error}", param="model") from error
    if not isinstance(found, dict):
        raise BrokenModel(f"{path} must hold a JSON object, not {type(found).__name__}", param="model")
    return path, found


def load_tokenizer(model: ResolvedModel) -> ModelTokenizer:
    """The tokenizer in the model's folder, or the byte-level one if its weights are random.

    Raises BrokenModel if the folder has no tokenizer that the `tokenizers` library can run, or one that has more tokens
    than the model. Added tokens do not count: some models, such as Gemma 3, name one that they never use.
    """
    if model.folder is None:
        return byte_tokenizer(model.config.vocab_size)
    saved = is_saved(model.folder)
    tokenizer = read_tokenizer(model.folder) if saved else _load_with_transformers(model.folder)
    tokens, known = tokenizer.backend.get_vocab_size(with_added_tokens=False), model.config.get_text_config().vocab_size
    if tokens > known:
        said = f"the tokenizer in {model.folder} has {tokens} tokens, and vocab_size in config.json is {known}"
        raise BrokenModel(f"{said}: it is not the model's", param="model")
    return tokenizer


def _load_with_transformers(folder: Path) -> ModelTokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a library trips over, it is these files that cannot be read
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenModel(f"Transformers cannot read the tokenizer in {folder}: {why}", param="model") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BrokenModel(f"the tokenizer in {folder} is not one of the tokenizers library")
    return ModelTokenizer.of(tokenizer)


def eos_token_ids(model: ResolvedModel, tokenizer: ModelTokenizer) -> frozenset[int]:
    """What generation_config.json (or, without one, config.json) and the tokenizer call the end of a turn.

    Raises BrokenModel for a generation_config.json that cannot be read.
    """
    said = read_generation(model)
    stored: Any = model.config.eos_token_id if said is None else said[1].get("eos_token_id")
    listed = stored if isinstance(stored, list) else [stored]
    return frozenset(token_id for token_id in [*listed, tokenizer.eos_token_id] if token_id is not None)

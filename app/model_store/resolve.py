"""From what the operator wrote after `--model` to a config and a folder of weights."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from app.domain.errors import UnknownModel
from app.domain.values import NEUTRAL, SamplingDefaults, WeightsDtype
from app.model_store.gguf import cached_gguf
from app.model_store.install import BrokenModel
from app.model_store.pull import CATALOG, download_from_hub, pull_model
from app.model_store.saved import Config, is_saved, read_config
from app.model_store.shapes import SHAPE_NAMES, shape_config
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

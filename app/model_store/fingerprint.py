"""Telling models apart by their content, so that KV of one is never used with another."""

import hashlib
import json

from app.domain.values import WeightsDtype
from app.model_store.gguf.index import weight_files
from app.model_store.resolve import ResolvedModel

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

"""Where each tensor of a model lies in a GGUF file, by the name that Transformers gives it.

It is found once, when the file is first seen. So a start reads no metadata of the file, and loads no library for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from app.model_store.errors import BrokenModel

INDEX = "gguf.json"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of `nbytes` bytes at `offset`. `kind` is its type's name in gguf's `GGMLQuantizationType`."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    heads: int = 0
    """Heads whose rows are interleaved for rotary pairs, which Transformers keeps as halves. 0: rows are in order."""


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The tensors of `file`, which has `nbytes` bytes."""

    file: Path
    nbytes: int
    tensors: Mapping[str, GgufTensor]

    def write(self, folder: Path) -> None:
        """Write it into `folder`; a file in the same folder is named relative to it."""
        file = self.file.name if self.file.parent == folder else str(self.file)
        tensors = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        (folder / INDEX).write_text(json.dumps({"file": file, "nbytes": self.nbytes, "tensors": tensors}))

    @classmethod
    def read(cls, folder: Path) -> GgufIndex:
        """The index in `folder`. Raises BrokenModel if it cannot be read."""
        try:
            found = json.loads((folder / INDEX).read_text())
            tensors = {
                name: GgufTensor(**{**fields, "shape": tuple(fields["shape"])})
                for name, fields in found["tensors"].items()
            }
            return cls(folder / found["file"], int(found["nbytes"]), tensors)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenModel(f"cannot read {folder / INDEX}: {error!r}", param="model") from error


def is_indexed(folder: Path) -> bool:
    """Whether the weights of a model's folder are in a GGUF file."""
    return (folder / INDEX).is_file()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model's folder; none if it has no weights. Raises BrokenModel."""
    return [GgufIndex.read(folder).file] if is_indexed(folder) else sorted(folder.glob("*.safetensors"))

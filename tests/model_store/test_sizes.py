"""Sizes of stored tensors are those of the tensors themselves."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from app.model_store.errors import BrokenModel
from app.model_store.gguf.conversion import cached_gguf
from app.model_store.gguf.tensors import GgufTensors
from app.model_store.sizes import stored_sizes
from tests.model_store.conftest import TinyModel


def test_sizes_of_shards(tiny: TinyModel, tmp_path: Path) -> None:
    deepcopy(tiny.model).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert len(files) > 1
    found = {name: (size.shape, size.elements, size.nbytes) for name, size in stored_sizes(tmp_path).items()}
    assert found == {name: (tuple(each.shape), each.numel(), each.nbytes) for name, each in tensors.items()}


def test_sizes_in_a_gguf_file(tiny: TinyModel, tmp_path: Path) -> None:
    folder = cached_gguf(tiny.gguf, tmp_path)
    tensors = GgufTensors(folder)
    for name, size in stored_sizes(folder).items():
        assert (size.shape, size.nbytes) == (tensors.values(name).shape, tensors.rows(name).nbytes)


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b'\x0a\0\0\0\0\0\0\0{"a": 1}  '])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BrokenModel, match=r"cannot read .*model\.safetensors"):
        stored_sizes(tmp_path)

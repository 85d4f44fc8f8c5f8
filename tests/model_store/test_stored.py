"""What is read of a model's files without Transformers, and refused where they are damaged."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from app.model_store.errors import BrokenModel
from app.model_store.gguf.cached import cached_gguf
from app.model_store.gguf.tensors import GgufTensors
from app.model_store.model_tokenizer import ModelTokenizer
from app.model_store.saved import SAVED, read_config, read_tokenizer
from app.model_store.sizes import stored_sizes
from tests.model_store.conftest import TinyModel


def test_sizes_of_shards(tiny: TinyModel, tmp_path: Path) -> None:
    deepcopy(tiny.model).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert len(files) > 1
    found = {name: (size.shape, size.elements, size.nbytes) for name, size in stored_sizes(tmp_path).items()}
    assert found == {name: (tuple(each.shape), each.numel(), each.nbytes) for name, each in tensors.items()}
    save_file({"layers.0.wq": torch.zeros(64, 64)}, tmp_path / "consolidated.safetensors")  # which nobody reads
    assert stored_sizes(tmp_path).keys() == found.keys()


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", 5])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, file: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(BrokenModel, match="no file of its folder"):
        stored_sizes(tmp_path)


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


@pytest.mark.parametrize(
    "change",
    [
        *({"nbytes": -1}, {"nbytes": 1 << 60}, {"nbytes": 40}, {"offset": "0"}, {"offset": -8}, {"offset": 1 << 40}),
        *({"kind": "X"}, {"kind": "Q8_0"}, {"unheard": 1}, {"shape": []}, {"shape": [3, True]}, {"heads": 3}),
    ],
)
def test_an_index_that_does_not_fit_its_file_is_refused(
    tiny: TinyModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = cached_gguf(tiny.gguf, tmp_path)
    index = json.loads((folder / "gguf.json").read_text())
    matrix = next(name for name, tensor in index["tensors"].items() if len(tensor["shape"]) == 2)
    index["tensors"][matrix] |= change
    (folder / "gguf.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match=r"cannot read .*gguf\.json"):
        stored_sizes(folder)


@pytest.fixture(scope="module")
def folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_gguf(tiny.gguf, tmp_path_factory.mktemp("cache"))


def test_config_and_tokenizer_are_those_that_transformers_reads(folder: Path) -> None:
    expected = AutoConfig.from_pretrained(folder).to_dict()
    del expected["_name_or_path"]
    config = read_config(folder)
    assert config.to_dict() == json.loads(json.dumps(expected, default=str))
    assert config.get_text_config().rope_parameters == expected["rope_parameters"]
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer = ModelTokenizer.of(loaded)
    found = read_tokenizer(folder)
    assert (found.facts, found.backend.to_str()) == (tokenizer.facts, tokenizer.backend.to_str())


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"config": [], "tokenizer": 5}', '{"config": {}}', pytest.param("[" * 100_000, id="deep")]
)
def test_a_file_without_the_parts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / SAVED).write_text(content)
    for read in (read_config, read_tokenizer):
        with pytest.raises(BrokenModel, match=SAVED):
            read(tmp_path)


@pytest.mark.parametrize("name", [SAVED, "tokenizer.json"])
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{")
    with pytest.raises(BrokenModel, match=name):
        read_tokenizer(tmp_path)

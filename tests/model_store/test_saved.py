"""What is read without Transformers is what Transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from app.model_store.errors import BrokenModel
from app.model_store.gguf.cached import cached_gguf
from app.model_store.model_tokenizer import ModelTokenizer
from app.model_store.saved import SAVED, read_config, read_tokenizer
from tests.model_store.conftest import TinyModel


@pytest.fixture(scope="module")
def folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_gguf(tiny.gguf, tmp_path_factory.mktemp("cache"))


def test_the_config_has_all_entries(folder: Path) -> None:
    expected = AutoConfig.from_pretrained(folder).to_dict()
    del expected["_name_or_path"]
    found = read_config(folder)
    assert found.to_dict() == json.loads(json.dumps(expected, default=str))
    assert found.get_text_config().rope_parameters == expected["rope_parameters"]


def test_the_tokenizer_is_the_same(folder: Path) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    expected = ModelTokenizer.of(loaded)
    found = read_tokenizer(folder)
    assert found.facts == expected.facts
    assert found.backend.to_str() == expected.backend.to_str()


@pytest.mark.parametrize("name", [SAVED, "tokenizer.json"])
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text("{")
    with pytest.raises(BrokenModel, match=name):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"config": [], "tokenizer": 5}', '{"config": {}}', pytest.param("[" * 100_000, id="deep")]
)
def test_a_file_without_the_parts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / SAVED).write_text(content)
    for read in (read_config, read_tokenizer):
        with pytest.raises(BrokenModel, match=SAVED):
            read(tmp_path)

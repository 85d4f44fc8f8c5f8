"""Sizes on the command line, and of models on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loadgen.errors import LoadgenError
from loadgen.experiments.weights.sizes import Budget, ModelBytes, parse_bytes, read_model_bytes
from tests.openai.reference import Reference, save_tiny_model


@pytest.mark.parametrize(
    ("text", "size"), [("90000000", 90_000_000), ("90MiB", 90 << 20), ("1.5GiB", 3 << 29), ("10GB", 10**10)]
)
def test_bytes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert Budget(text).of(1) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "90 MiB", "90mib", "MiB", "1e9", "0/6", "7/6", "1/0", "1/6/2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Budget(text)


def test_a_budget_may_be_a_share_of_the_model() -> None:
    assert Budget("1/6").of(600) == 100
    assert Budget("2/3").of(600) == 400


@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2)])
def test_a_pass_needs_all_but_the_embedding(tmp_path: Path, dtype: str, element: int) -> None:
    save_tiny_model(tmp_path)
    model = Reference(tmp_path).model
    total = sum(parameter.numel() for parameter in model.parameters())
    looked_up = model.get_input_embeddings().weight.numel()
    assert read_model_bytes(tmp_path, dtype) == ModelBytes(element * total, element * (total - looked_up))


def test_a_pass_needs_an_embedding_that_is_the_output_projection_too(tmp_path: Path) -> None:
    """In two files, as large models come."""
    save_file({"model.embed_tokens.weight": torch.zeros(8, 4)}, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "b.safetensors")
    assert read_model_bytes(tmp_path, "float32") == ModelBytes(4 * 36, 4 * 36)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadgenError, match=r"model\.safetensors is no safetensors file"):
        read_model_bytes(tmp_path, "float32")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match="has no safetensors"):
        read_model_bytes(tmp_path, "float32")

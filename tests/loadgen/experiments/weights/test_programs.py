"""The programs that Djinn is compared with, against Transformers; models' sizes; files out of the page cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.programs import ACCELERATE, DOUBLE_BUFFER, ProgramFailed, launches
from loadgen.experiments.weights.sizes import Budget, ModelBytes, parse_bytes, read_model_bytes
from loadgen.processes.line_process import line_process
from loadgen.rivals.double_buffer.__main__ import DoubleBuffer
from tests.openai.reference import Reference, save_tiny_model


@pytest.mark.parametrize(
    ("text", "size"), [("90000000", 90_000_000), ("90MiB", 90 << 20), ("1.5GiB", 3 << 29), ("10GB", 10**10)]
)
def test_bytes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert Budget(text).of(1) == size
    assert Budget("2/3").of(600) == 400


@pytest.mark.parametrize("text", ["", "0", "-1", "90 MiB", "90mib", "MiB", "1e9", "0/6", "7/6", "1/0", "1/6/2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Budget(text)


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


TOKENS = 6
PROMPTS = tuple(tuple((7 * place + 11 * session) % 250 for place in range(20)) for session in range(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    reference = Reference(folder)
    reference.model.generation_config.eos_token_id = None
    return [reference.greedy(list(prompt), TOKENS) for prompt in PROMPTS]


def asked(folder: Path, scratch: Path, budget_bytes: int) -> dict[str, Any]:
    return {"model": str(folder), "dtype": "float32", "budget_bytes": budget_bytes, "folder": str(scratch)}


async def answers(module: str, setup: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """What the program says of itself, and what it generates."""
    async with line_process([sys.executable, "-m", module], ProgramFailed) as process:
        about = await process.ask(setup)
        found = await process.ask({"prompts": PROMPTS, "tokens": TOKENS})
    assert found["seconds"] == sorted(found["seconds"])
    assert len(found["seconds"]) == TOKENS
    return about, found["token_ids"]


@pytest.mark.parametrize("spare_layers", [pytest.param(0, marks=pytest.mark.long), 2])
async def test_the_double_buffer_says_the_same_whatever_it_keeps(
    folder: Path, expected: list[list[int]], tmp_path: Path, spare_layers: int
) -> None:
    layer = layer_bytes(folder)
    about, found = await answers(DOUBLE_BUFFER, asked(folder, tmp_path, (2 + spare_layers) * layer))
    assert found == expected
    assert about["kept_bytes"] == spare_layers * layer
    norm_and_alignment = 1024
    needed = about["kept_bytes"] + about["streamed_bytes"]
    assert needed == pytest.approx(read_model_bytes(folder, "float32").per_pass, abs=norm_and_alignment)


@pytest.mark.long
async def test_accelerate_says_the_same(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    about, found = await answers(ACCELERATE, asked(folder, tmp_path, 1 << 20))
    assert found == expected
    assert about["offload"] == "disk"


@pytest.mark.parametrize(("layers", "message"), [(1.5, "two buffers of"), (100, "there is nothing to stream")])
def test_a_budget_that_is_of_no_use_is_refused(folder: Path, tmp_path: Path, layers: float, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        DoubleBuffer(asked(folder, tmp_path, int(layers * layer_bytes(folder))))


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path))
    assert [launch.way for launch in launches()] == [Way.DOUBLE_BUFFER, Way.ACCELERATE]


def layer_bytes(folder: Path) -> int:
    """What the tensors of layer 0 take, each aligned as it is in a bundle: all of a tiny model's sizes are."""
    head = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(head[:8], "little")
    tensors = json.loads(head[8 : 8 + length])
    spans = [found["data_offsets"] for name, found in tensors.items() if name.startswith("model.layers.0.")]
    return sum(end - begin for begin, end in spans)

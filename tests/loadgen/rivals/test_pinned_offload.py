"""The hand-written offload against Transformers: what comes back goes on to the token that a whole pass leads to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from client.models import DefaultSampling, Model
from loadgen.experiments.resume_latency.offload import OffloadFailed, Shape, hand_written_offload
from loadgen.experiments.resume_latency.plan import Cell
from tests.loadgen.experiments.test_resume_latency import server
from tests.openai.reference import save_tiny_model

LENGTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


def shape_of(folder: Path, *, with_model: bool) -> Shape:
    config = AutoModelForCausalLM.from_pretrained(folder).config
    elements = 2 * config.num_key_value_heads * config.head_dim
    model = str(folder) if with_model else None
    return Shape(config.num_hidden_layers, elements, config.hidden_size, "float32", model)


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 16])
async def test_the_next_token_is_that_of_a_whole_pass(folder: Path, first: int) -> None:
    history = tuple((7 * place + 11) % 250 for place in range(LENGTH))
    with torch.inference_mode():
        expected = int(AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([history])).logits[0, -1].argmax())
    shape = shape_of(folder, with_model=True)
    async with hand_written_offload() as offload:
        assert "threads" in await offload.describe(shape)
        await offload.prepare(history, first, range(shape.layers))
        for layer in reversed(range(shape.layers)):
            sample = await offload.restore(Cell(LENGTH, layer), 0)
            assert sample.token_id == expected
            assert sample.token_s is not None
            assert 0 < sample.standing_s < sample.token_s
            rows = shape.layers * first + (layer + 1) * (LENGTH - first)
            assert sample.bytes == rows * shape.elements * 4


@pytest.mark.long
async def test_without_a_model_as_many_bytes_are_moved_and_a_script_that_ends_says_why(folder: Path) -> None:
    shape = shape_of(folder, with_model=False)
    async with hand_written_offload() as offload:
        await offload.describe(shape)
        await offload.prepare((1,) * LENGTH, 0, [1])
        sample = await offload.restore(Cell(LENGTH, 1), 0)
        assert (sample.token_s, sample.token_id) == (None, None)
        assert sample.bytes == 2 * LENGTH * shape.elements * 4
        with pytest.raises(OffloadFailed, match="KeyError: 0"):
            await offload.restore(Cell(LENGTH, 0), 0)
        with pytest.raises(OffloadFailed, match="it ended with status 1"):
            await offload.restore(Cell(LENGTH, 1), 0)


def test_a_model_of_another_shape_than_the_servers_is_refused(folder: Path, tmp_path: Path) -> None:
    sampling = DefaultSampling(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    served = Model(id="other", max_model_len=512, layers=7, hidden_size=64, default_sampling=sampling)
    with pytest.raises(OffloadFailed, match="not of the shape of the server's"):
        Shape.of(server(1024, 4096), served, "float32", folder)
    with pytest.raises(OffloadFailed, match=r"reading the shape of the model in .* failed"):
        Shape.of(server(1024, 4096), served, "float32", tmp_path)

"""Models whose layers are cut into shards, against Transformers. The shards run on threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.linear.base import MatmulPrecision, Shard, dense_of
from app.gpu.models import load_stack, require_shards
from app.gpu.models.base import LayerStack
from app.model_store.resolve import ResolvedModel
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.kernels.linear.blocks import draw_blocks
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import CASES, build_model, expect, save_model, tiny_config
from tests.gpu.models.test_stacks import sequence

CPU = torch.device("cpu")
OWN = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gpt2", "mixtral", "qwen2_moe", "glm4_moe", "ernie4_5")
SHARDED = [case for case, shape in CASES.items() if shape["model_type"] in OWN]


@dataclass
class Meeting:
    """Where the threads of all shards add up what they have."""

    ranks: int
    parts: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all_here = threading.Barrier(self.ranks, timeout=60)

    def total(self, rank: int, part: Tensor) -> Tensor:
        return torch.stack(self._all(rank, part)).sum(0)

    def beside(self, rank: int, part: Tensor, size: int) -> Tensor:
        found = torch.cat(self._all(rank, part), 1)
        assert found.shape[1] == size
        return found

    def _all(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part
        self._all_here.wait()
        parts = [self.parts[each] for each in range(self.ranks)]
        self._all_here.wait()
        return parts

    def shard(self, rank: int) -> Shard:
        return Shard(rank, self.ranks, partial(self.total, rank), partial(self.beside, rank))


def load_shard(model: ResolvedModel, shard: Shard) -> LayerStack:
    return load_stack(
        model,
        device=CPU,
        dtype=torch.float32,
        attention=ReferenceAttention(),
        products=MatmulPrecision.FLOAT32,
        shard=shard,
    )


@pytest.mark.parametrize("case", SHARDED)
def test_shards_together_agree_with_transformers(case: str, tmp_path: Path) -> None:
    oracle: Any = build_model(tiny_config(case))
    model = ResolvedModel(case, tiny_config(case), save_model(oracle, tmp_path), seed=0)
    meeting = Meeting(2)
    stacks = [load_shard(model, meeting.shard(rank)) for rank in range(2)]
    whole = load_shard(model, Shard())
    assert [stack.kv_heads for stack in stacks] == [whole.kv_heads // 2] * 2
    assert {stack.parameter_bytes for stack in stacks} == {whole.parameter_bytes}
    tokens = sequence(25)

    def run(stack: LayerStack) -> Any:
        return Drive(stack, [tokens]).run([{0: 7}, {0: 16}, {0: 1}, {0: 1}])[0]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(run, stacks):
            assert_agrees(found, expect(oracle, tokens))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_blocks_are_cut_between_blocks_and_become_float32_where_one_is_cut(kind: str) -> None:
    length, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for blocks in (2, 3):
        matrix = draw_blocks(kind, rows=4, blocks=blocks)
        whole = torch.from_numpy(gguf.quants.dequantize(matrix.rows.numpy(), gguf.GGMLQuantizationType[kind]))
        columns = [Shard(rank, 2).columns(matrix) for rank in range(2)]
        rows = [Shard(rank, 2).rows(matrix) for rank in range(2)]
        assert all(isinstance(part, Tensor) == bool(blocks % 2) for part in columns)
        assert torch.equal(torch.cat([dense_of(part) for part in columns], 1), whole)
        assert torch.equal(torch.cat([dense_of(part) for part in rows]), whole)
        assert columns[0].shape == (4, blocks * length // 2)


@pytest.mark.parametrize(("case", "ranks"), [("llama", 4), ("llama", 3), ("gpt2", 8), ("gpt_neox", 2), ("olmo2", 2)])
def test_heads_that_cannot_be_divided_are_refused(case: str, ranks: int) -> None:
    model = ResolvedModel(case, tiny_config(case), None, seed=0)
    with pytest.raises(FieldOutOfRange, match="tensor_parallel must") as refused:
        require_shards(model, ranks)
    assert refused.value.param == "tensor_parallel"
    allowed = "one of 1, 2; got" if case == "llama" else "one of 1, 2, 4; got" if case == "gpt2" else "must be 1"
    assert allowed in refused.value.message

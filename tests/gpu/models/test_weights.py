"""Models whose matrices keep the checkpoint's type, whose weights come and go, or whose layers are cut into shards."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.device.streams import CpuStreams
from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import BlockMatrix, MatmulPrecision, Matrix, Shard, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, INT8, dequantize, quantize
from app.gpu.models import build_stack, load_stack, require_shards
from app.gpu.models.base import LayerStack
from app.gpu.weights.arena import plan_weights
from app.gpu.weights.bundles import ResidentWeights, StreamedWeights
from app.gpu.weights.checkpoint import weights_of
from app.gpu.weights.source import WeightSource
from app.gpu.weights.stores import PinnedStore
from app.model_store.resolve import ResolvedModel
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.kernels.linear.blocks import draw_blocks
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import CASES, VOCAB, build_model, expect, save_model, tiny_config
from tests.gpu.models.test_stacks import sequence

CPU = torch.device("cpu")
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gpt2", "mixtral", "glm4", "glm4_moe", "gemma2")
OF_FAMILIES = [case for case, fields in CASES.items() if fields["model_type"] in _FAMILIES]
STORED = [
    "llama",
    "llama-tied-biased-wide-heads",
    "qwen2",
    "qwen3",
    "olmo2",
    "phi3",
    "gpt2",
    "qwen2_moe, dense and shared",
]
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "n_embd": 64}
WIDTHS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
"""Whole blocks."""
WIDE = 1500
"""A vocabulary whose output projection is larger than a layer of the tiny models."""
LENGTHS = (41, 9)
STEPS = [{0: 33}, {0: 1, 1: 6}, {0: 1, 1: 1}, {0: 6, 1: 2}]
SEQUENCES = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
FLOAT32 = torch.float32
Keep = Callable[[str, Tensor], Matrix]
"""A matrix by its name as it is kept."""


class Storing(WeightSource):
    """It hands out the matrices of another one as `keep` has them."""

    def __init__(self, source: WeightSource, keep: Keep) -> None:
        self.nbytes = 0
        self._source, self._keep = source, keep

    def holds(self, name: str) -> bool:
        return self._source.holds(name)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        raise AssertionError(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._source.take(name, shape)
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        matrix = self._keep(name, self._source.take(name, shape))
        self.nbytes += matrix.nbytes if isinstance(matrix, Tensor) else matrix.rows.nbytes
        return matrix

    def finish(self, ignored: re.Pattern[str]) -> None:
        self._source.finish(ignored)


def as_dtype(dtype: torch.dtype) -> Keep:
    """Every matrix as `dtype`."""
    return lambda name, matrix: matrix.to(dtype)


def in_blocks(kind: str) -> Keep:
    """Every matrix in blocks of `kind`, also on `meta`."""

    def keep(name: str, matrix: Tensor) -> Matrix:
        type_, shape = GGMLQuantizationType[kind], (matrix.shape[0], matrix.shape[1])
        if matrix.is_meta:
            rows = torch.empty(gguf.quant_shape_to_byte_shape(shape, type_), dtype=torch.uint8, device="meta")
        else:
            rows = torch.from_numpy(gguf.quants.quantize(matrix.numpy(), type_))
        return BlockMatrix(kind, rows, shape)

    return keep


KEEPS = {
    "bfloat16": as_dtype(torch.bfloat16),
    "float16": as_dtype(torch.float16),
    **{kind: in_blocks(kind) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_1")},
}


def config_of(case: str, vocab_size: int = VOCAB) -> PretrainedConfig:
    fields = CASES[case]
    widths = {name: width for name, width in WIDTHS.items() if name in fields}
    config: PretrainedConfig = AutoConfig.for_model(**{**fields, **widths, "vocab_size": vocab_size})
    return config


def saved(case: str, folder: Path, vocab_size: int = VOCAB) -> ResolvedModel:
    config = config_of(case, vocab_size)
    save_model(build_model(config), folder)
    return ResolvedModel(case, config, folder, seed=0)


def stored(source: WeightSource, keep: Keep | None) -> WeightSource:
    return source if keep is None else Storing(source, keep)


def resident(
    model: ResolvedModel, keep: Keep | None = None, dtype: torch.dtype = FLOAT32, *, batch_invariant: bool = False
) -> LayerStack:
    weights = ResidentWeights(CPU, dtype, batch_invariant=batch_invariant)
    return build_stack(model, stored(weights_of(model, CPU, dtype), keep), weights, ReferenceAttention(), None)


def lend(
    model: ResolvedModel, keep: Keep | None = None, dtype: torch.dtype = FLOAT32, *, batch_invariant: bool = False
) -> tuple[LayerStack, StreamedWeights]:
    """The model, of which two bundles are there at a time, and what lends it these. What is said of its weights before
    they are read is what is read.
    """
    linear = linear_maker(CPU, dtype, batch_invariant=batch_invariant)
    said = stored(weights_of(model, CPU, dtype, on_meta=True), keep)
    weights = StreamedWeights(CPU, dtype, linear)
    stack = build_stack(model, said, weights, ReferenceAttention(), None)
    store = PinnedStore(weights.layout, CpuStreams(), chunk_bytes=4096)
    read = stored(weights_of(model, CPU, dtype), keep)
    filling = StreamedWeights(torch.device("meta"), dtype, linear, store.write)
    build_stack(model, read, filling, ReferenceAttention(), None)
    assert said.nbytes == read.nbytes
    sizes = [bundle.nbytes for bundle in weights.layout.bundles]
    weights.stream_from(store, CpuStreams(), plan_weights(sizes, 2 * max(sizes)))
    weights.share(0, 1)
    return stack, weights


def assert_same_bits(found: LayerStack, wanted: LayerStack) -> None:
    for ours, theirs in zip(Drive(found, SEQUENCES).run(STEPS), Drive(wanted, SEQUENCES).run(STEPS), strict=True):
        pairs = zip((*ours.boundaries, ours.logits), (*theirs.boundaries, theirs.logits), strict=True)
        for boundary, (one, other) in enumerate(pairs):
            assert other.isfinite().all()
            assert torch.equal(one, other), f"boundary {boundary}"


def assert_agrees_with(oracle: torch.nn.Module, stack: LayerStack, tolerance: float = 1e-4) -> None:
    for tokens, found in zip(SEQUENCES, Drive(stack, SEQUENCES).run(STEPS), strict=True):
        assert_agrees(found, expect(oracle, tokens), tolerance)


@pytest.mark.parametrize(
    ("case", "vocab_size", "dtype", "batch_invariant"),
    [
        *((case, WIDE, FLOAT32, False) for case in [*OF_FAMILIES, "smollm3", "qwen3_5", "lfm2"]),
        *((case, VOCAB, FLOAT32, False) for case in ("llama", "gpt2")),
        *((case, WIDE, dtype, False) for case in ("llama", "gpt2") for dtype in (torch.bfloat16, torch.float16)),
        ("qwen2", WIDE, FLOAT32, True),
    ],
)
def test_lent_weights_give_the_same_bits(
    case: str, vocab_size: int, dtype: torch.dtype, batch_invariant: bool, tmp_path: Path
) -> None:
    """In a pass each bundle is used once."""
    model = saved(case, tmp_path, vocab_size)
    kept = resident(model, None, dtype, batch_invariant=batch_invariant)
    stack, weights = lend(model, None, dtype, batch_invariant=batch_invariant)
    assert_same_bits(stack, kept)
    assert stack.parameter_bytes == kept.parameter_bytes
    sizes = [bundle.nbytes for bundle in weights.layout.bundles]
    assert weights.use(sum(sizes)).streamed_bytes == len(STEPS) * sum(sizes)
    # With a wide vocabulary there are the norm, and more than one part of the output projection.
    assert len(sizes) > 1 + stack.num_layers + (vocab_size == WIDE)
    if dtype is FLOAT32:
        assert_agrees_with(build_model(model.config), kept)


@pytest.mark.parametrize(("case", "kept_as"), [*zip(cycle(STORED), KEEPS), *zip(STORED, cycle(reversed(KEEPS)))])
def test_stored_matrices_give_the_bits_of_float32_and_agree_with_transformers(
    case: str, kept_as: str, tmp_path: Path
) -> None:
    keep = KEEPS[kept_as]
    model, oracle = saved(case, tmp_path), build_model(config_of(case))
    kept = resident(model, keep)
    assert_same_bits(kept, resident(model, lambda name, matrix: dense_of(keep(name, matrix)).float()))
    assert_same_bits(lend(model, keep)[0], kept)
    for name, parameter in oracle.named_parameters():
        if parameter.dim() > 1 and not name.endswith("gate.weight"):  # routers are taken in the computation's type
            parameter.copy_(dense_of(keep(name, parameter.data)))
    assert_agrees_with(oracle, kept)


def test_a_model_that_computes_in_a_half_type_takes_matrices_of_another(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    stack = resident(model, lambda name, matrix: dense_of(matrix).float(), torch.bfloat16)
    assert_same_bits(stack, resident(model, as_dtype(torch.bfloat16), torch.bfloat16))


# The layers that a GPU has for weights of 8 bits, beside Transformers with the same rounding.

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="they need Triton's interpreter"
)
KINDS = {WeightsDtype.INT8: INT8, WeightsDtype.FLOAT8: FLOAT8}
TOLERANCE = {WeightsDtype.INT8: 1e-4, WeightsDtype.FLOAT8: 0.03}
"""An input that lies between two numbers of float8 may become either."""


def rounded_as(kind: str, x: Tensor) -> Tensor:
    return dequantize(kind, quantize(kind, x.flatten(0, -2))).view(x.shape)


def rounded_oracle(case: str, matrices: WeightsDtype) -> Any:
    """Transformers' model, whose matrices are rounded, and for float8 the inputs of its linear layers too."""
    model = build_model(config_of(case))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(rounded_as(KINDS[matrices], parameter.data))
    for module in model.modules() if matrices is WeightsDtype.FLOAT8 else ():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (rounded_as(FLOAT8, inputs[0]),))
    return model


def stack_of(case: str, matrices: WeightsDtype, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LayerStack:
    """The layers of a GPU, in Triton's interpreter."""
    on_cuda = partial(linear_maker, torch.device("cuda"))
    monkeypatch.setattr("app.gpu.weights.bundles.linear_maker", lambda _, *args, **kwargs: on_cuda(*args, **kwargs))
    return resident(replace(saved(case, folder), weights_dtype=matrices))


@interpreted
@pytest.mark.parametrize(
    ("case", "matrices"),
    [
        ("llama", WeightsDtype.INT8),
        pytest.param("llama-tied-biased-wide-heads", WeightsDtype.INT8, marks=pytest.mark.long),
        pytest.param("qwen3", WeightsDtype.FLOAT8, marks=pytest.mark.long),
    ],
)
def test_the_answers_are_those_of_a_model_that_is_rounded_so(
    case: str, matrices: WeightsDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_of(case, matrices, tmp_path, monkeypatch)
    assert_agrees_with(rounded_oracle(case, matrices), stack, TOLERANCE[matrices])


@interpreted
def test_a_gpu_reads_experts_where_they_are_if_few_rows_visit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the eight experts in each of two layers a token visits three. They are copied for steps of three tokens on."""
    copies, copy = list[Tensor](), StreamedWeights._copy

    def counted(*given: Any) -> Any:
        copies.append(given[1])
        return copy(*given)

    monkeypatch.setattr(StreamedWeights, "_copy", counted)
    for module in ("app.gpu.weights.bundles", __name__):
        on_cuda = partial(linear_maker, torch.device("cuda"))
        monkeypatch.setattr(f"{module}.linear_maker", lambda _, *args, make=on_cuda, **kwargs: make(*args, **kwargs))
    model = saved("glm4_moe, groups", tmp_path)
    assert_same_bits(lend(model)[0], resident(model))
    assert len(copies) == 2 * 2 * sum(sum(step.values()) > 2 for step in STEPS)


@interpreted
@pytest.mark.parametrize("matrices", KINDS)
def test_the_bytes_are_those_of_8_bits(matrices: WeightsDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum(parameter.numel() for parameter in build_model(config_of("llama")).parameters())
    stack = stack_of("llama", matrices, tmp_path, monkeypatch)
    assert whole < stack.parameter_bytes < 1.15 * whole


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

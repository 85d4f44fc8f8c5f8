"""Engines of which the device holds a part of the weights, against those that hold all: the same bits, on a GPU too."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.values import KVPolicy, Phase, SamplingParams
from app.gpu.device.hardware import dtype_name
from app.gpu.device.streams import PASSED, streams_of
from app.gpu.forward.graphs import layer_by_layer, run_piece
from app.gpu.forward.results import LaunchedStep
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models import build_stack
from app.gpu.models.recipe import Recipe
from app.gpu.startup.weights import LoadedModel, load_model
from app.gpu.weights.bundles import ResidentWeights
from app.gpu.weights.file import WeightFile
from app.gpu.weights.source import RandomWeights, TensorFormat
from app.gpu.weights.stores import PinnedStore
from app.model_store.resolve import ResolvedModel
from app.settings import Settings
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.device.test_streams import Begun, Listening, on_a_gpu
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.models.oracle import tiny_config
from tests.gpu.weights.bundles import Model, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLED = SamplingParams(seed=3, temperature=0.9, top_p=0.9)


@contextmanager
def streaming(model: TinyModel, folder: Path, share: float) -> Iterator[TinyModel]:
    """The same model with room on the device for a `share` of its parameters; its files are kept in `folder`."""
    settings = Settings(device="cpu", weights_device=int(model.stack.parameter_bytes * share), cache_dir=folder)
    loaded = load_model(Recipe.choose(model.resolved, settings.engine()))
    assert loaded.streamed is not None
    try:
        yield replace(model, stack=loaded.stack, streams=loaded.streams, streamed=loaded.streamed)
    finally:
        loaded.close()


def say(model: TinyModel, seed: int) -> list[Any]:
    """What four sessions are told by an engine on whose device two of them have room.

    They compute together; one pauses after every layer and is edited there, one has all layers captured, one is
    steered, and all have their KV moved out between their turns.
    """
    engine = model.engine(blocks=24, host_blocks=200, policy=KVPolicy.SIGNAL)
    driver, chance, said = BreakDriver(engine), random.Random(seed), list[Any]()
    paused, captured, steered, _ = sessions = [driver.open() for _ in range(4)]
    layers = tuple(range(model.num_layers))
    driver.arm(paused, *layers, when=When(every=3))
    driver.arm(captured, *layers, action=Action.CAPTURE, when=When(Pass.DECODE))
    driver.arm(steered, *layers, action=Action.EDIT, edits=(Edit(EditOp.SCALE, factor=0.9),))
    for number in range(2):
        turns = [driver.begin(each, prompt(seed + number, 9 + 3 * i), 5, SAMPLED) for i, each in enumerate(sessions)]
        while not turns[0].rests:
            driver.advance()
        while turns[0].paused:
            said.append(driver.read(turns[0]).tolist())
            driver.edit(turns[0], Edit(EditOp.SCALE, factor=1.01))
            driver.resume(turns[0])
            driver.settle(turns[0])
        driver.run_together(turns, chance)
        said += [turn.tokens for turn in turns]
        said += [tensor_of(record.tensor).tolist() for record in driver.captures(captured).records]
        for each in sessions:
            driver.signal(each, Phase.IO_WAIT)
            assert driver.place(each).device_bytes == 0
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param("scaled_llama", 1 / 6, marks=pytest.mark.long),
        pytest.param("tiny_mistral", 1 / 6, marks=pytest.mark.long),
        ("tiny_llama", 0.6),
        ("tiny_llama", 0.97),
    ],
)
def test_tokens_and_activations_are_those_of_an_engine_that_holds_all(
    request: pytest.FixtureRequest, folder: Path, name: str, share: float
) -> None:
    model: TinyModel = request.getfixturevalue(name)
    with streaming(model, folder, share) as streamed:
        assert say(streamed, seed=1) == say(model, seed=1)


@pytest.mark.usefixtures("exact_clock")
def test_it_makes_no_difference_whether_weights_are_used_in_the_file_or_copied(
    tiny_gpt2: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, expected, is_intact = random.Random(0), say(tiny_gpt2, seed=1), WeightFile.is_intact
    for share in (1, 0, 0.5):
        monkeypatch.setattr(
            WeightFile, "is_intact", lambda *asked, share=share: chance.random() < share and is_intact(*asked)
        )
        with streaming(tiny_gpt2, folder, 0.25) as streamed:
            assert say(streamed, seed=1) == expected


def test_weights_lend_their_memory_to_sessions_that_compute(tiny_gpt2: TinyModel, folder: Path) -> None:
    """Six turns, with room for the KV of two: those that compute get that of weights."""
    found = []
    with streaming(tiny_gpt2, folder, 0.8) as streamed:
        for model in (tiny_gpt2, streamed):
            driver = BreakDriver(model.engine(blocks=16, host_blocks=200, policy=KVPolicy.SIGNAL))
            kept, blocks = [driver.memory().text.kept_bytes], [driver.memory().device.total_bytes]
            turns = [driver.begin(driver.open(), prompt(seed, 20), 12) for seed in range(6)]
            while not all(turn.rests for turn in turns):
                driver.advance()
                kept.append(driver.memory().text.kept_bytes)
                blocks.append(driver.memory().device.total_bytes)
            found.append([turn.tokens for turn in turns])
    assert found[0] == found[1]
    assert min(kept) < kept[0]
    assert max(blocks) > blocks[0]


def test_a_token_is_told_before_the_next_sweep_begins(
    torch_gpt2: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a GPU the launch of a sweep waits for most of its copies."""
    monkeypatch.setattr(LaunchedStep, "done", False)  # the step runs beside the engine's thread
    with streaming(torch_gpt2, tmp_path, 0.9) as model:
        stack = Begun(model.stack)
        stage = Listening(
            replace(model, stack=stack).engine(blocks=20, policy=KVPolicy.NONE, max_draft_tokens=0), stack
        )
        stage.run()
    assert stage.beside == [False] * 6


CUDA, BLOCKS = torch.device("cuda"), 64
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""


@torch.inference_mode()
def logits_of(loaded: LoadedModel, *, lend: bool) -> list[torch.Tensor]:
    """Of a prompt and some tokens after it, while weights are lent and come back."""
    stack, memory, arena = loaded.stack, None, None
    if loaded.streamed is not None:
        block_bytes = KVPool(stack, 1, BLOCK).data.nbytes
        arena, memory = loaded.streamed.share(BLOCKS, block_bytes)
    pool, found, first = KVPool(stack, BLOCKS, BLOCK, memory), [], 0
    for number, length in enumerate([40, 1, 1, 1, 7, 1, 1]):
        batch = make_batch([(first, length)], [list(range(BLOCKS))], BLOCK, stack.device)
        tokens = torch.arange(first, first + length, device=stack.device) % 90
        found.append(run_piece(stack, layer_by_layer(stack, pool), 0, stack.num_layers + 1, tokens, batch))
        first += length
        if lend and loaded.streamed is not None and arena is not None:
            for bundle in arena.lendable[:2]:
                (loaded.streamed.take_back if number % 2 else loaded.streamed.lend)(bundle)
    return found


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_logits_of_a_gpu_are_equal(tiny_mistral: TinyModel, tmp_path: Path, dtype: torch.dtype, share: float) -> None:
    size = tiny_mistral.stack.parameter_bytes * dtype.itemsize // 4
    given: dict[str, Any] = {"device": "cuda", "dtype": dtype_name(dtype), "cache_dir": tmp_path}
    settings = [Settings(weights_device=budget, **given).engine() for budget in (None, int(size * share))]
    everything, part = (load_model(Recipe.choose(tiny_mistral.resolved, each)) for each in settings)
    assert part.streamed is not None
    try:
        wanted, found = logits_of(everything, lend=False), logits_of(part, lend=True)
        assert all(map(torch.equal, found, wanted))
    finally:
        part.close()


@on_a_gpu
def test_bundles_arrive_beside_compute_and_behind_their_guards() -> None:
    model = Model([[torch.randn(1 << 20)], [torch.randn(1 << 20, device=CUDA)]], [torch.randn(100, 64)])
    streams = streams_of(CUDA)
    store = PinnedStore(model.layout, streams, 1 << 20)
    model.fill(store.write)
    places = torch.zeros(2, 4 << 20, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    computed = streams.compute.record()
    store.load(0, places[0], PASSED).synchronize()
    assert not computed.query()
    behind = store.load(1, places[1], computed)
    assert not behind.query()
    behind.synchronize()
    assert computed.query()
    for place, [tensor] in zip(places, model.bundles, strict=True):
        assert same_bits(place.view(torch.float32).cpu(), tensor.cpu())
    rows = store.rows(0, torch.tensor([99, 0, 99]))
    assert rows.is_pinned()
    assert same_bits(rows, model.tables[0][[99, 0, 99]])
    store.close()


class _Remembering(RandomWeights):
    """Knows what it has given away."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(0, config, TensorFormat(torch.device("cuda"), torch.bfloat16))
        self.given: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.given[name] = super().take(name, shape)
        return self.given[name]


@torch.no_grad()
@on_a_gpu
def test_a_tied_output_projection_is_the_embedding_itself_where_weights_stay_as_they_are() -> None:
    config = tiny_config("gpt2")
    cuda = torch.device("cuda")
    source, weights = _Remembering(config), ResidentWeights(cuda, torch.bfloat16, batch_invariant=False)
    stack = build_stack(ResolvedModel("tied", config, None, 0), source, weights, ReferenceAttention(), None)
    hidden = torch.randn(2, 48, dtype=torch.bfloat16, device=cuda)
    assert stack.head(hidden).any()
    source.given["transformer.wte.weight"].zero_()
    assert not stack.head(hidden).any()

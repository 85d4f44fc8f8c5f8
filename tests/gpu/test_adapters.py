"""LoRA adapters in the engine: PEFT's merged model is the oracle."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from app.domain.errors import AdapterMissing, AdaptersFull, BadAdapter, WrongState
from app.domain.values import KVBudget, KVPolicy, LoadedAdapter, Phase, SessionId
from app.gpu.startup.loader import load_engine
from app.gpu.weights.adapters import CONFIG, WEIGHTS
from app.messages import Export, Import, ImportedKV, LoadAdapter, Open, Restored, Rewind, Token, UnloadAdapter
from app.model_store.resolve import ResolvedModel, resolve
from tests.adapters import make_adapter
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.driving import BLOCK, GREEDY, cpu_settings
from tests.gpu.models.oracle import CASES, build_model, save_model, tiny_config
from tests.gpu.tiny_engine import greedy_after, greedy_tokens, make_engine, model, oracle, prompt

__all__ = ["model", "oracle"]

PATTERNS = {"k_proj": 2, "^model.layers.1.mlp.down_proj": 5}
SOME = {"target_modules": r".*\.(o_proj|up_proj)", "exclude_modules": ["layers.2.mlp.up_proj"]}
KINDS: list[dict[str, Any]] = [
    {"r": 40, "lora_alpha": 5},
    {"target_modules": "all-linear"},
    {"use_rslora": True, "r": 3},
    {
        "target_modules": ["down_proj", "k_proj"],
        "rank_pattern": PATTERNS,
        "alpha_pattern": {r"layers\.0.*down_proj": 7},
    },
    SOME,
    {"target_modules": ["gate_proj"], "layers_to_transform": [1, 3]},
    {},
    {"target_modules": "all-linear", "r": 1},
]
PROMPT, COUNT = prompt(1, 19), 8


@pytest.fixture(scope="module")
def adapters(model: ResolvedModel, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """One of each kind, with its merged model."""
    assert model.folder is not None
    folder = tmp_path_factory.mktemp("adapters")
    return [
        (folder / str(seed), make_adapter(model.folder, folder / str(seed), seed, **kind))
        for seed, kind in enumerate(KINDS)
    ]


class AdapterDriver(BreakDriver):
    def load(self, folder: Path) -> LoadedAdapter:
        loaded = self.do(LoadAdapter(self.ticket(), str(folder)))
        assert isinstance(loaded, LoadedAdapter)
        return loaded

    def open_with(self, digest: str, name: str = "adapted", history: tuple[int, ...] = ()) -> SessionId:
        self.do(Open(self.ticket(), SessionId(name), adapter=digest, token_ids=history))
        return SessionId(name)


def driver_of(model: ResolvedModel, **changed: Any) -> AdapterDriver:
    return AdapterDriver(make_engine(model, **{"max_running": 16, **changed}))


def test_eight_adapters_and_the_base_in_one_batch(
    model: ResolvedModel, oracle: Any, adapters: list[tuple[Path, Any]]
) -> None:
    """Rows of the base have the bits that they have alone."""
    driver, scored = driver_of(model, batch_invariant=True), replace(GREEDY, logprobs=3)
    alone = driver.turn(driver.open("alone"), PROMPT, COUNT, scored)
    turns = [(driver.begin(driver.open(), PROMPT, COUNT, scored), oracle)]
    for number, (folder, merged) in enumerate(adapters):
        session = driver.open_with(driver.load(folder).digest, f"adapted-{number}")
        turns.append((driver.begin(session, PROMPT, COUNT, scored), merged))
    turns.append((driver.begin(driver.open("other"), PROMPT, COUNT, scored), oracle))
    driver.settle(*(turn for turn, _ in turns))
    for turn, expected in turns:
        assert turn.tokens == greedy_tokens(expected, PROMPT, COUNT)
    assert len({tuple(turn.tokens) for turn, _ in turns}) > 4
    for turn in (turns[0][0], turns[-1][0]):
        assert [e.logprobs for e in turn.said if isinstance(e, Token)] == [
            e.logprobs for e in alone.said if isinstance(e, Token)
        ]
    use = driver.memory().adapters
    assert use.count == 8
    assert 0 < use.bytes < use.limit_bytes


def test_a_session_with_an_adapter_pauses_forks_parks_and_rewinds(
    model: ResolvedModel, adapters: list[tuple[Path, Any]]
) -> None:
    """And what two adapters, or an adapter and the base, compute of the same tokens is never shared."""
    driver = driver_of(model, host_blocks=100, policy=KVPolicy.SIGNAL)
    (folder, merged), (other, others) = adapters[1], adapters[2]
    driver.turn(driver.open(), PROMPT, COUNT)
    session = driver.open_with(driver.load(folder).digest)
    made = driver.arm(session, 2)
    turn = driver.turn(session, PROMPT, COUNT)
    assert turn.paused
    with pytest.raises(WrongState, match="1 turn of its sessions"):
        driver.do(UnloadAdapter(driver.ticket(), driver.load(folder).digest))
    assert len(driver.run(turn)) >= COUNT
    assert turn.end.usage.cached_tokens == 0
    assert turn.tokens == greedy_tokens(merged, PROMPT, COUNT)
    driver.disarm(session, made)
    second = driver.turn(driver.open_with(driver.load(other).digest, "second"), PROMPT, COUNT)
    same = driver.turn(driver.open_with(driver.load(folder).digest, "same"), PROMPT, COUNT)
    assert second.tokens == greedy_tokens(others, PROMPT, COUNT)
    assert (second.end.usage.cached_tokens, same.end.usage.cached_tokens) == (0, len(PROMPT) // BLOCK * BLOCK)
    driver.signal(session, Phase.IO_WAIT)
    child = driver.fork_idle(session)
    history = [*PROMPT, *turn.tokens]
    for each, more in ((session, prompt(2, 5)), (child, prompt(3, 6))):
        went_on = driver.turn(each, more, COUNT)
        assert went_on.tokens == greedy_after(merged, [*history, *more], went_on.tokens)
        assert went_on.end.usage.tokens_recomputed == 0
    driver.do(Rewind(driver.ticket(), session, 10))
    again = driver.turn(session, prompt(4, 3), COUNT)
    assert again.tokens == greedy_tokens(merged, [*PROMPT[:10], *prompt(4, 3)], COUNT)
    driver.do(UnloadAdapter(driver.ticket(), driver.load(folder).digest))
    with pytest.raises(AdapterMissing):
        driver.turn(session, [1], 1)


def test_an_adapter_of_the_text_model_beside_one_that_sees_images(tmp_path: Path) -> None:
    """PEFT's names say which is which. The text model folds, too."""
    seeing = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 48, "num_heads": 2}
    config = AutoConfig.for_model("qwen3_5", text_config=CASES["qwen3_5"], vision_config=seeing)
    base = save_model(build_model(config, AutoModelForImageTextToText), tmp_path / "base")
    modules = r".*language_model.*\.(q_proj|in_proj_qkv|out_proj)"
    merged = make_adapter(base, tmp_path / "adapter", 1, AutoModelForImageTextToText, target_modules=modules)
    room = {"kv_policy": KVPolicy.NONE, "max_step_tokens": 16, "kv_device": KVBudget(bytes=1 << 22)}
    settings = cpu_settings(**room, kv_host=KVBudget(bytes=0))
    driver = AdapterDriver(load_engine(resolve(str(base), cache_dir=tmp_path), settings))
    turn = driver.turn(driver.open_with(driver.load(tmp_path / "adapter").digest), range(3, 22), COUNT)
    assert turn.tokens == greedy_tokens(merged, [*range(3, 22)], COUNT)


def test_kv_on_disk_is_of_one_adapter(model: ResolvedModel, adapters: list[tuple[Path, Any]], tmp_path: Path) -> None:
    folder, merged = adapters[6]
    begun, names = {"kv_dir": tmp_path, "policy": KVPolicy.SIGNAL}, ["same", "base"]
    driver = driver_of(model, host_blocks=10, **begun)
    digest = driver.load(folder).digest
    for name in names:
        turn = driver.turn(driver.open_with(digest, name), PROMPT, COUNT)
        driver.signal(turn.session, Phase.IDLE)
        driver.do(Export(driver.ticket(), turn.session, str(tmp_path / f"{name}.export")))
    history = (*PROMPT, *turn.tokens)
    after = driver_of(model, host_blocks=100, **begun)
    assert after.load(folder).digest == digest
    for name, adapter in zip(names, (digest, ""), strict=True):
        after.open_with(adapter, name, history)
    after.do(Restored(after.ticket()))
    turns = [after.turn(SessionId(name), [7], 4) for name in names]
    assert turns[0].tokens == greedy_tokens(merged, [*history, 7], 4)
    assert [turn.end.usage.cached_tokens > len(PROMPT) for turn in turns] == [True, False]
    found = after.do(Import(after.ticket(), SessionId("came"), str(tmp_path / "same.export"), "came"))
    assert isinstance(found, ImportedKV)
    assert found.adapter == digest
    assert after.turn(SessionId("came"), [7], 4).tokens == turns[0].tokens


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ZEROS = torch.zeros(4, 64)
BAD: list[tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = [
    ({"r": 5}, {}, rf"{WEIGHTS}: {Q_PROJ} is \[4, 64\], must be \[5, 64\] for the base model and rank 5"),
    ({"use_dora": True}, {}, f"{CONFIG}: use_dora must be empty"),
    ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save must be empty"),
    ({"use_magic": True}, {}, "use_magic must be empty: Djinn does not know"),
    ({"bias": "all"}, {}, f"{CONFIG}: bias must be none; got all"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights must be one of"),
    ({"lora_alpha": "8"}, {}, "lora_alpha must be a number above 0"),
    ({"target_modules": "(a+)+$"}, {}, "target_modules: the expression .* is too complex"),
    ({"target_modules": "(q_proj"}, {}, "target_modules: .* is no regular expression"),
    ({"target_modules": ["q_proj", "o_proj"]}, {}, "has no .*layers.0.self_attn.o_proj.*, which target_modules"),
    ({}, {Q_PROJ: ZEROS[:, :32].clone()}, rf"{WEIGHTS}: {Q_PROJ} is \[4, 32\], must be \[4, 64\]"),
    ({}, {Q_PROJ: ZEROS / 0}, f"{Q_PROJ} has values that are not finite"),
    ({}, {Q_PROJ: ZEROS.int()}, f"{Q_PROJ} is torch.int32"),
    ({}, {Q_PROJ: None}, f"has no {Q_PROJ}"),
    ({}, {Q_PROJ.replace("q_proj", "z_proj"): ZEROS}, "z_proj.* is of a module that the base model has not"),
    ({}, {"base_model.model.lm_head.weight": ZEROS}, "lm_head.weight' is no factor"),
]


@pytest.mark.parametrize(("config", "weights", "message"), BAD)
def test_a_folder_that_cannot_be_read_is_refused_by_file_and_field(
    adapters: list[tuple[Path, Any]],
    tmp_path: Path,
    bad_driver: AdapterDriver,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    folder, _ = adapters[6]
    (tmp_path / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **config}))
    stored = {**load_file(folder / WEIGHTS), **weights}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / WEIGHTS)
    with pytest.raises(BadAdapter, match=message):
        bad_driver.load(tmp_path)


@pytest.fixture(scope="module")
def bad_driver(model: ResolvedModel) -> AdapterDriver:
    return driver_of(model)


def test_hostile_files_are_refused(
    model: ResolvedModel, adapters: list[tuple[Path, Any]], tmp_path: Path, bad_driver: AdapterDriver
) -> None:
    """Also one that is larger than what is left for adapters, and one for a model without places for them."""
    with pytest.raises(BadAdapter, match=f"there is no file .*{CONFIG}"):
        bad_driver.load(tmp_path)
    (tmp_path / CONFIG).write_bytes((adapters[6][0] / CONFIG).read_bytes())
    whole = (adapters[6][0] / WEIGHTS).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for data in (b"", b"\xff" * 64, whole[:-1], whole[:8] + b"[" * header + whole[8 + header :]):
        (tmp_path / WEIGHTS).write_bytes(data)
        with pytest.raises(BadAdapter, match=f"{WEIGHTS} is no safetensors file"):
            bad_driver.load(tmp_path)
    for text in (b"[]", b"\xff", b"[" * 100_000):
        (tmp_path / CONFIG).write_bytes(text)
        with pytest.raises(BadAdapter, match=f"{CONFIG} is no JSON"):
            bad_driver.load(tmp_path)
    small = driver_of(model, lora_bytes=45_000)
    small.load(adapters[6][0])
    with pytest.raises(AdaptersFull, match=f"{WEIGHTS} has .*unload others"):
        small.load(adapters[2][0])
    assert small.memory().adapters.count == 1
    foreign = driver_of(ResolvedModel("tiny", tiny_config("vaultgemma"), None, 0, model.weights_dtype))
    with pytest.raises(BadAdapter, match="'vaultgemma' runs on Transformers' modules, without adapters"):
        foreign.load(adapters[6][0])

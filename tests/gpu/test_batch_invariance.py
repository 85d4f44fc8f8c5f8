"""With `batch_invariant` a token has the same bits alone, in company, in pieces, paused, swapped and moved."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.domain.breakpoints import Action, Pass, When
from app.domain.errors import FieldOutOfRange
from app.domain.values import KVPolicy, Phase, SessionId
from app.gpu.device.hardware import dtype_name
from app.gpu.kernels.attention import attention_for
from app.gpu.models import load_stack
from app.messages import PromptScored, Token
from app.model_store.resolve import resolve
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.driving import GREEDY
from tests.gpu.models.oracle import CASES, build_model, save_model, tiny_config

START = prompt(40, 37)
COUNT = 12
CPU = torch.device("cpu")
needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FAMILY = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3")
REPORTING = replace(GREEDY, logprobs=3)
Bits = dict[tuple[int, int], bytes]
"""By layer and position: the residual stream after that layer."""


def invariant(case: str, device: torch.device, dtype: torch.dtype, folder: Path, kv_dtype: str = "auto") -> TinyModel:
    """One of `CASES`, loaded with `batch_invariant`."""
    with torch.no_grad():
        oracle = build_model(tiny_config(case))
    resolved = resolve(str(save_model(oracle, folder)), cache_dir=folder)
    attention = attention_for(device, batch_invariant=True)
    stack = load_stack(resolved, device=device, dtype=dtype, attention=attention, batch_invariant=True)
    return TinyModel(resolved, stack, oracle, kv_dtype=kv_dtype)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, "auto"),
        (torch.float16, "auto"),
        (torch.bfloat16, "float8"),
        *(
            pytest.param((torch.float32, kv_dtype), marks=pytest.mark.long)
            for kv_dtype in ("bfloat16", "float16", "float8")
        ),
    ],
    ids=lambda types: f"{dtype_name(types[0])}-{types[1]}",
)
def model(request: pytest.FixtureRequest, device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    dtype, kv_dtype = request.param
    return invariant("llama", device, dtype, tmp_path_factory.mktemp("llama"), kv_dtype)


def logprobs(turn: Turn) -> list[object]:
    """Everything that was said of the generated tokens, to the last bit."""
    return [(event.token_id, event.logprobs) for event in turn.said if isinstance(event, Token)]


def bits(driver: BreakDriver, session: SessionId) -> Bits:
    found: Bits = {}
    for record in driver.captures(session).records:
        data, width = record.tensor.joined().data, record.tensor.nbytes // len(record.positions)
        for index, position in enumerate(record.positions):
            found[record.layer, position] = data[index * width : (index + 1) * width]
    return found


def watched(driver: BreakDriver, model: TinyModel) -> SessionId:
    return driver.open_armed(*range(model.num_layers), action=Action.CAPTURE)


@pytest.fixture(scope="module")
def alone(model: TinyModel) -> tuple[Bits, list[object]]:
    """The whole prompt in one step, then one token at a time, with nobody else there."""
    driver = BreakDriver(model.engine(max_step_tokens=64))
    session = watched(driver, model)
    turn = driver.turn(session, START, COUNT, REPORTING)
    found = bits(driver, session)
    assert len(found) == model.num_layers * (len(START) + COUNT - 1)
    return found, logprobs(turn)


@pytest.mark.parametrize("max_step_tokens", [5, 17])
def test_a_prompt_in_chunks(model: TinyModel, alone: tuple[Bits, list[object]], max_step_tokens: int) -> None:
    driver = BreakDriver(model.engine(max_step_tokens=max_step_tokens))
    session = watched(driver, model)
    turn = driver.turn(session, START, COUNT, REPORTING)
    assert (bits(driver, session), logprobs(turn)) == alone


@pytest.mark.parametrize("before", [0, 9])
def test_in_company(model: TinyModel, alone: tuple[Bits, list[object]], before: int) -> None:
    driver = BreakDriver(model.engine())
    others = [driver.begin(driver.open(), prompt(seed, 5 + 6 * seed), 40) for seed in range(6)]
    for _ in range(before):
        driver.advance()
    session = watched(driver, model)
    turns = [driver.begin(session, START, COUNT, REPORTING), driver.begin(driver.open(), START, COUNT, REPORTING)]
    driver.settle(*turns, *others)
    assert bits(driver, session) == alone[0]
    assert [logprobs(turn) for turn in turns] == [alone[1]] * 2


def test_paused_between_layers_and_swapped(model: TinyModel, alone: tuple[Bits, list[object]]) -> None:
    driver = BreakDriver(model.engine(host_blocks=100, policy=KVPolicy.SIGNAL))
    session = watched(driver, model)
    driver.arm(session, 0, 2, when=When(Pass.DECODE))
    driver.arm(session, 1, when=When(Pass.PREFILL))
    others = [driver.begin(driver.open(), prompt(seed, 9), 30) for seed in range(3)]
    turn = driver.begin(session, START, COUNT, REPORTING)
    for _ in range(3):
        driver.settle(turn)
        assert turn.paused
        driver.signal(session, Phase.IO_WAIT)
        assert not driver.place(session).device_bytes
        driver.resume(turn)
    driver.run(turn)
    driver.settle(*others)
    assert (bits(driver, session), logprobs(turn)) == alone


def test_lost_and_computed_again(model: TinyModel, alone: tuple[Bits, list[object]]) -> None:
    """What was decoded comes as a prompt the second time."""
    driver = BreakDriver(model.engine(blocks=18))
    turns = [driver.begin(driver.open(), START, COUNT, REPORTING) for _ in range(2)]
    turns += [driver.begin(driver.open(), prompt(seed, 20), 20, REPORTING) for seed in range(3)]
    driver.settle(*turns)
    assert any(turn.end.usage.tokens_recomputed for turn in turns)
    assert [logprobs(turn) for turn in turns[:2]] == [alone[1]] * 2


GPT2 = ["gpt2", "gpt2-scaled-by-layer"]


@pytest.mark.parametrize("case", [*(case for case, shape in CASES.items() if shape["model_type"] in FAMILY), *GPT2])
def test_every_model_scores_a_prompt_alike_at_once_and_in_chunks_beside_others(
    case: str, device: torch.device, tmp_path: Path
) -> None:
    model = invariant(case, device, torch.float32, tmp_path)
    scored = []
    for max_step_tokens, company in ((64, 0), (17, 3)):
        driver = BreakDriver(model.engine(max_step_tokens=max_step_tokens))
        others = [driver.begin(driver.open(), prompt(seed, 9), 8) for seed in range(company)]
        turn = driver.begin(driver.open(), START, 1, replace(GREEDY, prompt_logprobs=4))
        driver.settle(turn, *others)
        [found] = [event for event in turn.said if isinstance(event, PromptScored)]
        scored.append(found.logprobs)
    assert scored[0] == scored[1]


@pytest.mark.parametrize(
    ("case", "why"), [("gpt2-relu", "activation of 'gpt2'"), ("gpt_neox", "Transformers' modules")]
)
def test_a_model_that_cannot_be_is_refused(case: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(FieldOutOfRange, match=why) as refused:
        invariant(case, CPU, torch.float32, tmp_path)
    assert refused.value.param == "batch_invariant"

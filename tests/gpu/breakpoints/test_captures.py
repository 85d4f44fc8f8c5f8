"""What sessions keep of their passes, maps of it against Transformers, and how much memory all of it may take."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from app.domain.activations import ActivationMap, ActivationNorms, LensAsk, LensRows, PausedTurn
from app.domain.breakpoints import ALL, LAST, Action, Edit, EditOp, Pass, Positions, When
from app.domain.errors import ActivationsFull
from app.domain.points import Point
from app.domain.values import KVPolicy, SessionId
from app.messages import (
    Attribute,
    ClearCaptures,
    Export,
    Fork,
    Import,
    Lens,
    LoadUpload,
    MapLens,
    OpenMap,
    ReadNorms,
    ReadPaused,
    Reinstate,
    Rewind,
)
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import assert_close, boundaries, greedy, tensor_of

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(6, 11)
COUNT = 7
LAYERS = range(12)


@pytest.fixture
def driver(tiny_gpt2: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_gpt2.engine())


def capturing(driver: BreakDriver, *layers: int) -> SessionId:
    return driver.open_armed(*layers, action=Action.CAPTURE)


def open_map(
    driver: BreakDriver, session: SessionId, positions: Positions = ALL, layers: tuple[int, ...] | None = None
) -> ActivationMap:
    found = driver.do(OpenMap(driver.ticket(), session, positions, layers))
    assert isinstance(found, ActivationMap)
    return found


def lens(driver: BreakDriver, session: SessionId, first: int, end: int, top_k: int = 1) -> LensRows:
    found = driver.do(MapLens(driver.ticket(), session, first, end, LensAsk(top_k)))
    assert isinstance(found, LensRows)
    return found


def says(oracle: Any, hidden: Tensor) -> Tensor:
    """Log-probabilities of Transformers' own norm and head, `[rows, vocab]`."""
    with torch.no_grad():
        logits = oracle.lm_head(oracle.transformer.ln_f(hidden))
    return torch.log_softmax(logits, dim=-1)


def test_the_lens_of_each_layer_is_that_of_transformers(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session = capturing(driver, *LAYERS)
    history = START + driver.turn(session, START, 5).tokens
    found = open_map(driver, session)
    assert (found.first, found.end, found.kept_first, found.kept_end) == (0, 15, 0, 15)
    assert list(found.token_ids) == history[:15]
    assert [(each.layer, each.positions) for each in found.layers] == [(k, tuple(range(15))) for k in LAYERS]
    rows = [row for begin in range(0, found.count, 7) for row in lens(driver, session, begin, begin + 7, 3).rows]
    wanted = boundaries(tiny_gpt2.oracle, history)
    for layer in LAYERS:
        best = says(tiny_gpt2.oracle, wanted[layer + 1][:15]).topk(3)
        for position, top in enumerate(rows[15 * layer : 15 * (layer + 1)]):
            assert [token for token, _ in top] == best.indices[position].tolist()
            assert [logprob for _, logprob in top] == pytest.approx(best.values[position].tolist(), abs=1e-3)


def test_a_lens_tells_how_two_sessions_differ(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    session, other = capturing(driver, 3, 8), capturing(driver, 8)
    prompts = START, [*START[:4], (START[4] + 1) % 60 + 3, *START[5:7]]
    driver.turn(session, prompts[0], 1)
    driver.turn(other, prompts[1], 1)
    here, there = (says(tiny_gpt2.oracle, boundaries(tiny_gpt2.oracle, each)[9]) for each in prompts)
    driver.do(OpenMap(driver.ticket(), session, Positions(3, 9), None, beside=other))
    told: Any = driver.do(MapLens(driver.ticket(), session, 0, 12, LensAsk(2)))
    assert [math.isnan(gap) for gap, _ in told.others] == [True] * 6 + [False] * 4 + [True] * 2
    for row, position in enumerate(range(3, 7), 6):
        gap, changed = told.others[row]
        wanted = torch.nn.functional.kl_div(there[position], here[position], reduction="sum", log_target=True)
        assert gap == pytest.approx(float(wanted), abs=1e-4)
        change = here[position].exp() - there[position].exp()
        assert [value for _, value in changed] == pytest.approx(
            [float(change[token]) for token, _ in changed], abs=1e-5
        )
        assert abs(changed[0][1]) == pytest.approx(float(change.abs().max()), abs=1e-5)


@pytest.mark.parametrize("adds", [True, False])
def test_an_uploaded_lens_is_read_by_the_same_head(
    driver: BreakDriver, tiny_gpt2: TinyModel, tmp_path: Path, adds: bool
) -> None:
    """A tuned lens adds what its matrix makes of the stream, a Jacobian lens takes it; the last layer has none."""
    torch.manual_seed(3)
    size, session = tiny_gpt2.oracle.config.n_embd, capturing(driver, 4, 11)
    weight, bias = torch.randn(size, size) / size, torch.randn(size)
    save_file({"4.weight": weight, "4.bias": bias}, tmp_path / "lens.safetensors")
    driver.do(LoadUpload(driver.ticket(), str(tmp_path / "lens.safetensors"), "digest"))
    driver.turn(session, START, 1)
    streams, found = boundaries(tiny_gpt2.oracle, START), open_map(driver, session)
    ask = LensAsk(1, "digest", adds, (7, 3), measures=True)
    told: Any = driver.do(MapLens(driver.ticket(), session, 0, found.count, ask))
    made = torch.nn.functional.linear(streams[5], weight, bias)
    wanted = says(tiny_gpt2.oracle, torch.cat([streams[5] + made if adds else made, streams[12]]))
    last = wanted[len(START) :].repeat(2, 1)
    assert [top[0][0] for top in told.rows] == wanted.argmax(-1).tolist()
    ranks = [[int((row > row[token]).sum()) for token in (7, 3)] for row in wanted]
    assert [[rank for rank, _ in each] for each in told.chosen] == ranks
    logprobs = torch.tensor([[logprob for _, logprob in each] for each in told.chosen])
    assert_close(logprobs, wanted[:, [7, 3]])
    measures = torch.tensor(told.measures)
    assert_close(measures[:, 0], torch.distributions.Categorical(logits=wanted).entropy())
    gaps = torch.nn.functional.kl_div(wanted, last, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(measures[:, 1], gaps, atol=1e-4)


def test_parts_add_up_to_the_difference_of_two_logits(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    oracle, session = tiny_gpt2.oracle, capturing(driver, 2, 5, 11)
    inner = Point.MLP_OUT, Point.Z, Point.MLP_POST
    for point in inner:
        driver.arm(session, 5, action=Action.CAPTURE, point=point)
    driver.turn(session, START, 1)
    told: Any = driver.do(Attribute(driver.ticket(), session, Positions(7, 8), (7, 3), neurons=4))
    streams = [stream[7] for stream in boundaries(oracle, START)]
    norm, head = oracle.transformer.ln_f, oracle.lm_head.weight
    scale = norm.weight / (streams[12].var(unbiased=False) + norm.eps).sqrt()
    gains = [streams[3], streams[6] - streams[3], streams[12] - streams[6]]
    wanted = [float((gain - gain.mean()) * scale @ (head[7] - head[3])) for gain in gains]
    places = [(2, Point.RESID_POST), (5, Point.MLP_OUT), (5, Point.RESID_POST), (11, Point.RESID_POST)]
    assert [(layer, point) for layer, point, _ in told.parts] == places
    values = [value for _, point, value in told.parts if point is Point.RESID_POST]
    assert values == pytest.approx(wanted, abs=1e-4)
    assert told.total == pytest.approx(sum(values) + float(norm.bias @ (head[7] - head[3])), abs=1e-4)
    kept = {each.point: tensor_of(each.tensor)[7] for each in driver.captures(session).records}
    block, heads = oracle.transformer.h[5], kept[Point.Z].shape[0]
    of_heads = kept[Point.Z][:, None] @ block.attn.c_proj.weight.view(heads, -1, oracle.config.n_embd)
    of_neurons = kept[Point.MLP_POST][:, None] * block.mlp.c_proj.weight
    of_each = [
        ((each - each.mean(-1, keepdim=True)) * scale) @ (head[7] - head[3]) for each in (of_heads[:, 0], of_neurons)
    ]
    assert [place[:2] for place in told.units] == [(5, Point.Z), (5, Point.MLP_POST)]
    assert [value for _, value in told.units[0][2]] == pytest.approx(of_each[0].tolist(), abs=1e-4)
    assert [index for index, _ in told.units[1][2]] == of_each[1].abs().topk(4).indices.tolist()
    assert [value for index, value in told.units[1][2]] == pytest.approx(
        [float(of_each[1][index]) for index, _ in told.units[1][2]], abs=1e-4
    )


def test_a_paused_layer_is_read_as_it_was_edited(driver: BreakDriver) -> None:
    """The map equals the lens of the checkpoint there, though a capture at the same layer is older."""
    session = capturing(driver, 3, 5)
    driver.arm(session, 5)
    driver.edit(driver.turn(session, START, 3), Edit(EditOp.SCALE, factor=-2.0))
    assert [each.layer for each in open_map(driver, session, LAST, (3, 9)).layers] == [3]
    found = open_map(driver, session, Positions(4, 11))
    assert [each.layer for each in found.layers] == [3, 5]
    single: Any = driver.do(Lens(driver.ticket(), session, Positions(4, 11), 2))
    assert lens(driver, session, 7, 14, 2).rows == single.rows


def test_what_a_rewind_has_cut_off_is_not_on_the_map(driver: BreakDriver, tiny_gpt2: TinyModel) -> None:
    """Not even where the new history has the same token at the same position."""
    session = capturing(driver, 6)
    driver.turn(session, START, 1)
    driver.do(Rewind(driver.ticket(), session, 4))
    assert [each.positions for each in open_map(driver, session).layers] == [(0, 1, 2, 3)]
    other = [(START[4] + 1) % 60 + 3, *START[5:9]]
    driver.turn(session, other, 1)
    found = open_map(driver, session)
    assert found.layers[0].positions == tuple(range(9))
    best = says(tiny_gpt2.oracle, boundaries(tiny_gpt2.oracle, START[:4] + other)[7]).max(dim=-1).values
    assert [top[0][1] for top in lens(driver, session, 0, 9).rows] == pytest.approx(best.tolist(), abs=1e-3)


def test_norms_and_cosines_are_those_of_the_captures(driver: BreakDriver) -> None:
    session = capturing(driver, 2, 7)
    driver.turn(session, START, 1)
    records = driver.captures(session).records
    tensors = {each.layer: tensor_of(each.tensor).double() for each in records}
    direction = records[0].tensor.joined().rows(3, 4)
    vector = type(direction)(direction.dtype, direction.shape[1:], direction.data)
    measure: Any = driver.do(ReadNorms(driver.ticket(), session, ALL, None, vector))
    found = measure()
    assert isinstance(found, ActivationNorms)
    assert found.cosines is not None
    for index, layer in enumerate((2, 7)):
        assert found.norms[index] == pytest.approx(tensors[layer].norm(dim=1).tolist())
        wanted = torch.nn.functional.cosine_similarity(tensors[layer], tensors[2][3:4])
        assert found.cosines[index] == pytest.approx(wanted.tolist(), abs=1e-6)
    plain: Any = driver.do(ReadNorms(driver.ticket(), session, ALL, (7,), None))
    assert (plain().norms, plain().cosines) == (found.norms[1:], None)


LAYER = 2


def driver_with(model: TinyModel, rows: int, **settings: Any) -> BreakDriver:
    """With room for so many positions."""
    return BreakDriver(model.engine(max_activation_bytes=rows * model.hidden_size * 4, **settings))


def paused(driver: BreakDriver, session: SessionId) -> Turn:
    """A turn that waits at its prompt. Raises the error that ends it."""
    driver.arm(session, LAYER, when=When(Pass.PREFILL))
    turn = driver.turn(session, START, COUNT)
    assert turn.paused
    return turn


def test_captures_of_all_sessions_share_the_room_and_turns_go_on_without(tiny_llama: TinyModel) -> None:
    driver = driver_with(tiny_llama, 2 * len(START) + 2)
    sessions = [driver.open() for _ in range(3)]
    for session in sessions:
        driver.arm(session, LAYER, action=Action.CAPTURE, when=When(Pass.PREFILL))
        turn = driver.turn(session, START, COUNT)
        assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)
    found = [driver.captures(session) for session in sessions]
    assert [(len(each.records), each.dropped) for each in found] == [(1, 0), (1, 0), (0, 1)]
    driver.do(ClearCaptures(driver.ticket(), sessions[0]))
    driver.close(sessions[1])
    for number in range(2):
        driver.turn(sessions[2], prompt(7 + number, len(START)), 1)
    assert len(driver.captures(sessions[2]).records) == 2


def test_a_tenant_leaves_as_much_as_it_takes(tiny_llama: TinyModel) -> None:
    driver = driver_with(tiny_llama, 4 * len(START))
    for _ in range(2):
        paused(driver, driver.open("many"))
    with pytest.raises(ActivationsFull, match="of this tenant, who leaves others as much"):
        paused(driver, driver.open("many"))
    for number in range(2):
        paused(driver, driver.open(f"other-{number}"))
    with pytest.raises(ActivationsFull):
        paused(driver, driver.open("late"))


def exported(driver: BreakDriver, session: SessionId, imported: SessionId, folder: Path) -> PausedTurn:
    """What a paused session has; its history and KV are imported as another one."""
    read, path = driver.do(ReadPaused(driver.ticket(), session)), str(folder / "session.kv")
    assert isinstance(read, PausedTurn)
    driver.do(Export(driver.ticket(), session, path, "{}"))
    driver.do(Import(driver.ticket(), imported, path, ""))
    return read


def test_copies_of_a_paused_session_need_room(tiny_llama: TinyModel, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"host_blocks": 200, "policy": KVPolicy.SIGNAL, "kv_dir": tmp_path / "kv"}
    driver = driver_with(tiny_llama, 2 * len(START) - 1, **tiers)
    session, child, imported = driver.open(), SessionId("child"), SessionId("imported")
    turn = paused(driver, session)
    with pytest.raises(ActivationsFull):
        driver.do(Fork(driver.ticket(), session, child, driver.ticket()))
    read = exported(driver, session, imported, tmp_path)
    with pytest.raises(ActivationsFull):
        driver.do(Reinstate(driver.ticket(), imported, paused=read, turn=driver.ticket()))
    driver.cancel(turn)
    driver.do(Reinstate(driver.ticket(), imported, paused=read, turn=driver.ticket()))

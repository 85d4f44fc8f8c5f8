"""Every point of every family: what is captured is what Transformers has there, an edit does what a hook does, and a
turn that pauses there says the same.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from app.domain.breakpoints import Action, Edit, EditOp
from app.domain.points import ABOUT, Axis, Point
from app.gpu.models import FAMILIES as OURS
from app.gpu.models import family
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny, prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.breakpoints.point_oracle import seen
from tests.gpu.models.oracle import CASES

pytestmark = pytest.mark.usefixtures("one_thread")
START, COUNT, LAYER = prompt(6, 13), 3, 1
FAMILIES = ["llama", "gpt2", "olmo2", "phi3-window", "gemma2", "granite", "glm4", "glm4_moe, groups", "gpt_oss, sinks"]
FAMILIES += ["deepseek_v3, latents", "qwen3_next", "gpt_neox", "gptj", "phimoe, window in the mask"]
"""The last ones are Transformers' modules: all rows attend together, or row by row."""
LONG = [
    "qwen3",
    "smollm3",
    "gemma3",
    "helium",
    "mixtral",
    "qwen2_moe, dense and shared",
    "olmo3",
    "ernie4_5",
    "minimax_m2",
]


@pytest.fixture(scope="module", params=[*FAMILIES, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(CASES[request.param], tmp_path_factory.mktemp("model"))


def points_of(tiny: TinyModel) -> dict[Point, int]:
    """Those of the second layer, and of the whole model, with a layer that they have."""
    found = tiny.stack.points
    return {
        point: LAYER if shapes[LAYER] is not None else next(i for i, shape in enumerate(shapes) if shape is not None)
        for point, shapes in found.items()
        if any(shapes)
    }


def wanted(
    tiny: TinyModel, tokens: list[int], points: dict[Point, int], change: Point | None = None
) -> dict[Point, Tensor]:
    """What Transformers has at the points, `[tokens, ...]`, and with `change` what follows if a quarter of it stays."""
    found = dict[Point, Tensor]()

    def see(point: Point, x: Tensor) -> None:
        if point is change:
            x.mul_(0.25)
        found[point] = x.clone()

    for layer in set(points.values()):
        here = {point: partial(see, point) for point, at in points.items() if at == layer}
        with seen(tiny.oracle, layer, here), torch.no_grad():
            tiny.oracle(input_ids=torch.tensor([tokens]))
    return found


def close(point: Point, found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if ABOUT[point].axis is Axis.KEYS else 1e-4 * float(expected.abs().max())
    assert float((found - expected).abs().max()) < tolerance, point


def test_captures_are_what_transformers_has(tiny: TinyModel) -> None:
    driver, points = BreakDriver(tiny.engine()), points_of(tiny)
    session = driver.open()
    for point, layer in points.items():
        driver.arm(session, layer, action=Action.CAPTURE, point=point)
    turn = driver.turn(session, START, COUNT)
    tokens = [*START, *turn.tokens][: len(START) + COUNT - 1]
    expected = wanted(tiny, tokens, points)
    kept = driver.captures(session)
    assert kept.dropped == 0
    assert {record.point for record in kept.records} == set(points)
    for record in kept.records:
        if record.point is Point.STATE:
            [last] = record.positions
            with torch.no_grad():
                left = tiny.oracle(input_ids=torch.tensor([tokens[: last + 1]]), use_cache=True).past_key_values
            kept_there = left.layers[record.layer]
            states = [kept_there.conv_states[0][0, :, 1:].T, kept_there.recurrent_states[0]]  # but the next to fall out
            close(record.point, tensor_of(record.tensor)[0], torch.cat([each.flatten() for each in states]))
            continue
        found, here = tensor_of(record.tensor), expected[record.point][list(record.positions)]
        if record.point is Point.PATTERN:
            close(record.point, found, here[..., : found.shape[2]])
            assert not here[..., found.shape[2] :].any()
            continue
        close(record.point, found.flatten(1), here.flatten(1))


QUARTER = Edit(EditOp.SCALE, 0.25)


def test_edits_are_what_a_hook_does(tiny: TinyModel) -> None:
    driver, points = BreakDriver(tiny.engine()), points_of(tiny)
    for point, layer in points.items():
        if not ABOUT[point].edits:
            continue
        session = driver.open()
        driver.arm(session, layer, action=Action.EDIT, edits=(QUARTER,), point=point)
        driver.arm(session, tiny.num_layers - 1, action=Action.CAPTURE, point=Point.LOGITS)
        turn = driver.turn(session, START, COUNT)
        last = {point: layer, Point.LOGITS: layer}  # hooks of one layer, and one on the model
        tokens = [*START, *turn.tokens][: len(START) + COUNT - 1]
        logits = wanted(tiny, tokens, last, point)[Point.LOGITS]
        found = torch.cat([tensor_of(record.tensor) for record in driver.captures(session).records])
        assert turn.tokens == logits[len(START) - 1 :].argmax(-1).tolist(), point
        close(Point.LOGITS, found, logits)
        driver.close(session)


def test_a_turn_that_pauses_and_loses_its_kv_says_the_same(tiny: TinyModel) -> None:
    """Beside another one, whose tokens do not change. Edits before and behind the pause are made once."""
    driver, points = BreakDriver(tiny.engine(blocks=20)), points_of(tiny)
    edited = driver.open()
    for point in (Point.RESID_PRE, Point.MLP_OUT):
        driver.arm(edited, LAYER, action=Action.EDIT, edits=(QUARTER,), point=point)
    expected = driver.turn(edited, START, COUNT).tokens
    plain = driver.turn(driver.open(), START, COUNT).tokens
    assert plain != expected
    for lose, (point, layer) in enumerate(points.items()):
        if not ABOUT[point].pauses:
            continue
        session, other = driver.open(), driver.begin(driver.open(), START, COUNT)
        for each in (Point.RESID_PRE, Point.MLP_OUT):
            driver.arm(session, LAYER, action=Action.EDIT, edits=(QUARTER,), point=each)
        driver.arm(session, layer, point=point)
        driver.arm(session, layer, action=Action.CAPTURE, point=point)
        turn = driver.turn(session, START, COUNT)
        pauses = 0
        while turn.paused:
            pauses += 1
            assert (turn.checkpoint.point, turn.checkpoint.layer) == (point, layer)
            [*_, record] = driver.captures(session).records
            torch.testing.assert_close(driver.read(turn), tensor_of(record.tensor).flatten(1), rtol=0, atol=0)
            if lose % 2:
                driver.fill(min(70, driver.engine.info.max_model_len - 4))
            driver.go_on(turn)
        assert pauses == COUNT
        assert turn.tokens == expected, point
        driver.settle(other)
        assert other.tokens == plain
        driver.close(session)
        driver.close(other.session)


def test_the_table_of_families_is_that_of_the_registry() -> None:
    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in found)

    page, found = Path("docs/breakpoints.md").read_text(), dict[frozenset[Point], list[str]]()
    for name, each in sorted(OURS.items()):
        config = AutoConfig.for_model(name, n_shared_experts=1)  # of which one config says nothing
        found.setdefault(frozenset(family.points_of(each, config)), []).append(name)
    for points, families in found.items():
        assert f"| {names(families)} | {names(point for point in Point if point not in points)} |" in page

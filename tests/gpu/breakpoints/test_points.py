"""Every point of every family: what is captured is what Transformers has there, an edit does what a hook does, and a
turn that pauses there says the same.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from app.domain.breakpoints import LAST, Action, Edit, EditOp, Gate
from app.domain.points import ABOUT, Axis, Point, PointShape
from app.gpu.models import FAMILIES as OURS
from app.gpu.models import family
from app.messages import Attribute
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import data_of, tensor_of
from tests.gpu.breakpoints.point_oracle import seen
from tests.gpu.models.oracle import CASES

pytestmark = pytest.mark.usefixtures("one_thread")
START, COUNT, LAYER = prompt(6, 13), 3, 1
QUICK = {"gemma2", "glm4_moe", "gpt2", "gpt_oss", "granite", "llama", "olmo2", "phi3", "qwen3_next", "deepseek_v3"}
QUICK |= {"gpt_neox", "gptj", "phimoe"}
"""The last ones are Transformers' modules: all rows attend together, or row by row."""
CASE_OF = {config["model_type"]: case for case, config in CASES.items() if config["model_type"] in {*OURS, *QUICK}}


@pytest.fixture(scope="module", params=[pytest.param(k, marks=[pytest.mark.long] * (k not in QUICK)) for k in CASE_OF])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model of each family of the table, with all points of that family."""
    kind: str = request.param
    made = make_tiny(CASES[CASE_OF[kind]], tmp_path_factory.mktemp("model"))
    if kind in OURS:
        assert in_table(kind) <= set(points_of(made))
    return made


def points_of(tiny: TinyModel) -> dict[Point, int]:
    """Those of the second layer, and of the whole model, with a layer that they have."""
    found = tiny.stack.points
    return {
        point: LAYER if shapes[LAYER] is not None else next(i for i, shape in enumerate(shapes) if shape is not None)
        for point, shapes in found.items()
        if any(shapes)
    }


def shape_of(tiny: TinyModel, point: Point, layer: int) -> PointShape:
    shape = tiny.stack.points[point][layer]
    assert shape is not None
    return shape


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
    """Whole captures, and those at the positions where a condition on a value holds."""
    driver, points = BreakDriver(tiny.engine()), points_of(tiny)
    session = driver.open()
    along, waiting = dict[Point, Tensor](), dict[str, Point]()
    for point, layer in points.items():
        driver.arm(session, layer, action=Action.CAPTURE, point=point)
        if ABOUT[point].axis not in (Axis.KEYS, Axis.STATE):
            along[point] = vector(len(along), shape_of(tiny, point, layer).width)
            gate = Gate(data_of(along[point]), above=0.0)
            waiting[driver.arm(session, layer, action=Action.CAPTURE, point=point, gate=gate).id] = point
    turn = driver.turn(session, START, COUNT)
    tokens = [*START, *turn.tokens][: len(START) + COUNT - 1]
    expected = wanted(tiny, tokens, points)
    kept = driver.captures(session)
    for id, point in waiting.items():
        held = (expected[point].flatten(1) @ along[point] > 0).nonzero()[:, 0].tolist()
        assert [at for record in kept.records if record.breakpoint == id for at in record.positions] == held, point
    assert kept.dropped == 0
    assert {record.point for record in kept.records} == set(points)
    for record in kept.records:
        if record.point is Point.STATE:
            [last] = record.positions
            with torch.no_grad():
                left = tiny.oracle(input_ids=torch.tensor([tokens[: last + 1]]), use_cache=True)
            kept_there = (getattr(left, "past_key_values", None) or left.cache_params).layers[record.layer]
            states = [kept_there.conv_states[0][0, :, 1:].T]  # without the input that leaves next
            if (matrices := kept_there.recurrent_states[0]) is not None:
                is_mamba = not hasattr(tiny.oracle.config, "linear_num_value_heads")
                states.append(matrices.transpose(-1, -2) if is_mamba else matrices)
            close(record.point, tensor_of(record.tensor)[0], torch.cat([each.flatten() for each in states]))
            continue
        found, here = tensor_of(record.tensor), expected[record.point][list(record.positions)]
        if record.point is Point.PATTERN:
            close(record.point, found, here[..., : found.shape[2]])
            assert not here[..., found.shape[2] :].any()
            continue
        close(record.point, found.flatten(1), here.flatten(1))


SUMS = {Point.Z: Point.ATTN_OUT, Point.MLP_POST: Point.MLP_OUT}
QUARTER = Edit(EditOp.SCALE, 0.25)


@pytest.mark.parametrize("tiny", ["llama", "granite", "gemma2", "glm4", "olmo3", "deepseek_v3"], indirect=True)
def test_heads_and_neurons_add_up_to_what_their_layer_adds_to_a_difference_of_logits(tiny: TinyModel) -> None:
    """Also behind multipliers and norms."""
    driver, points = BreakDriver(tiny.engine()), points_of(tiny)
    session = driver.open_armed(tiny.num_layers - 1, action=Action.CAPTURE)
    sums = {inside: out for inside, out in SUMS.items() if inside in points}
    for inside, point in sums.items():
        for each in (inside, point):
            driver.arm(session, points[inside], action=Action.CAPTURE, point=each)
    driver.turn(session, START, 0)
    found: Any = driver.do(Attribute(driver.ticket(), session, LAST, (21, 60), neurons=200))
    parts = {point: value for _, point, value in found.parts}
    for _, inside, units in found.units:
        assert len(units) > 1
        assert sum(value for _, value in units) == pytest.approx(parts[sums[inside]], rel=1e-3, abs=1e-3)
    assert len(found.units) == len(sums)


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
    blocks = 120 if tiny.oracle.config.model_type == "mamba2" else 20  # it keeps states alone, and its blocks are small
    driver, points = BreakDriver(tiny.engine(blocks=blocks)), points_of(tiny)
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
        width, may_wait = shape_of(tiny, point, layer).width, lose % 2 and not driver.engine.info.state_bytes
        holds = Gate(data_of(torch.zeros(width)), above=-1.0) if may_wait else None
        driver.arm(session, layer, point=point, gate=holds)
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


def in_table(kind: str) -> frozenset[Point]:
    config = AutoConfig.for_model(kind, n_shared_experts=1)  # one config does not name this value
    return frozenset(family.points_of(OURS[kind], config))


def test_the_table_of_families_is_that_of_the_registry() -> None:
    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in found)

    page, found = Path("docs/breakpoints.md").read_text(), dict[frozenset[Point], list[str]]()
    for name in sorted(OURS):
        found.setdefault(in_table(name), []).append(name)
    assert set(OURS) <= set(CASE_OF)
    for points, families in found.items():
        assert f"| {names(families)} | {names(point for point in Point if point not in points)} |" in page

"""Every point of every family, in each kind of layer: what is captured is what Transformers has there, an edit does
what a hook does, and a turn that pauses there says the same.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from app.domain.breakpoints import LAST, Action, Edit, EditOp, Gate, When
from app.domain.points import ABOUT, WHOLE, Axis, Point, PointShape
from app.domain.positions import positions_of, runs_of
from app.gpu.models.stack import points_of
from app.gpu.models.variants import VARIANTS as OURS
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
    return make_tiny(CASES[CASE_OF[kind]], tmp_path_factory.mktemp("model"))


Place = tuple[Point, int]
"""A point, and the layer that it is in."""


def shapes_of(tiny: TinyModel) -> dict[Place, PointShape]:
    """Of one layer of each type that the config tells, and of each set of points; of such layers LAYER or the last."""
    count, found = tiny.num_layers, tiny.stack.points.items()
    shapes = {(point, layer): shape for point, of in found for layer, shape in enumerate(of) if shape is not None}
    types = getattr(tiny.oracle.config, "layer_types", None) or [""] * count
    inside = [frozenset(point for point, at in shapes if at == layer) - WHOLE for layer in range(count)]
    rising = sorted(shapes, key=lambda place: place[1] == LAYER)
    return {place: shapes[place] for place in {(at[0], types[at[1]], inside[at[1]]): at for at in rising}.values()}


def wanted(
    tiny: TinyModel, tokens: list[int], places: Iterable[Place], change: Place | None = None
) -> dict[Place, Tensor]:
    """What Transformers has at the places, `[tokens, ...]`, and with `change` what follows if a quarter of it stays."""
    found = dict[Place, Tensor]()

    def see(place: Place, x: Tensor) -> None:
        if place == change:
            x.mul_(0.25)
        found[place] = x.clone()

    for layer in {layer for _, layer in places}:
        here = {point: partial(see, (point, at)) for point, at in places if at == layer}
        with seen(tiny.oracle, layer, here), torch.no_grad():
            tiny.oracle(input_ids=torch.tensor([tokens]))
    return found


def close(place: Place, found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if ABOUT[place[0]].axis is Axis.KEYS else 1e-4 * float(expected.abs().max())
    assert float((found - expected).abs().max()) < tolerance, place


def test_captures_are_what_transformers_has(tiny: TinyModel) -> None:
    """Whole captures, and those at the positions where a condition on a value holds."""
    driver, shapes = BreakDriver(tiny.engine()), shapes_of(tiny)
    session = driver.open()
    along, armed = dict[str, Tensor](), dict[str, Place]()
    for place, shape in shapes.items():
        at: dict[str, Any] = {"action": Action.CAPTURE, "point": place[0]}
        armed[driver.arm(session, place[1], **at).id] = place
        if ABOUT[place[0]].axis not in (Axis.KEYS, Axis.STATE):
            direction = vector(len(along), shape.width)
            made = driver.arm(session, place[1], gate=Gate(data_of(direction), above=0.0), **at)
            along[made.id], armed[made.id] = direction, place
    turn = driver.turn(session, START, COUNT)
    tokens = [*START, *turn.tokens][: len(START) + COUNT - 1]
    expected = wanted(tiny, tokens, shapes)
    kept = driver.captures(session)
    for id, direction in along.items():
        held = (expected[armed[id]].flatten(1) @ direction > 0).nonzero()[:, 0].tolist()
        assert [at for record in kept.records if record.breakpoint == id for at in record.positions] == held, armed[id]
    assert kept.dropped == 0
    assert {armed[record.breakpoint] for record in kept.records} == set(shapes)
    for record in kept.records:
        place = armed[record.breakpoint]
        if record.point is Point.STATE:
            [last] = record.positions
            with torch.no_grad():
                left = tiny.oracle(input_ids=torch.tensor([tokens[: last + 1]]), use_cache=True)
            kept_there = (getattr(left, "past_key_values", None) or left.cache_params).layers[record.layer]
            states = [kept_there.conv_states[0][0, :, 1:].T]  # without the input that leaves next
            if (matrices := kept_there.recurrent_states[0]) is not None:
                is_mamba = not hasattr(tiny.oracle.config, "linear_num_value_heads")
                states.append(matrices.transpose(-1, -2) if is_mamba else matrices)
            close(place, tensor_of(record.tensor)[0], torch.cat([each.flatten() for each in states]))
            continue
        found, here = tensor_of(record.tensor), expected[place][list(record.positions)]
        if record.point is Point.PATTERN:
            close(place, found, here[..., : found.shape[2]])
            assert not here[..., found.shape[2] :].any()
            continue
        close(place, found.flatten(1), here.flatten(1))


SUMS = {Point.Z: Point.ATTN_OUT, Point.MLP_POST: Point.MLP_OUT}
QUARTER, SOME = Edit(EditOp.SCALE, 0.25), runs_of([3, 4, 9, *range(12, 15)])


@pytest.mark.parametrize("tiny", ["llama", "granite", "gemma2", "glm4", "olmo3", "deepseek_v3"], indirect=True)
def test_heads_and_neurons_add_up_to_what_their_layer_adds_to_a_difference_of_logits(tiny: TinyModel) -> None:
    """Also behind multipliers and norms."""
    driver = BreakDriver(tiny.engine())
    session = driver.open_armed(tiny.num_layers - 1, action=Action.CAPTURE)
    for point, layer in shapes_of(tiny):
        if point in {*SUMS, *SUMS.values()}:
            driver.arm(session, layer, action=Action.CAPTURE, point=point)
    driver.turn(session, START, 0)
    found: Any = driver.do(Attribute(driver.ticket(), session, LAST, (21, 60), neurons=200))
    parts = {(point, layer): value for layer, point, value in found.parts}
    for layer, inside, units in found.units:
        assert len(units) > 1
        assert sum(value for _, value in units) == pytest.approx(parts[SUMS[inside], layer], rel=1e-3, abs=1e-3)
    assert len(found.units) == sum(point in SUMS for point, _ in shapes_of(tiny))


def test_edits_are_what_a_hook_does(tiny: TinyModel) -> None:
    driver = BreakDriver(tiny.engine())
    for point, layer in shapes_of(tiny):
        if not ABOUT[point].edits:
            continue
        session = driver.open()
        driver.arm(session, layer, action=Action.EDIT, edits=(QUARTER,), point=point)
        driver.arm(session, tiny.num_layers - 1, action=Action.CAPTURE, point=Point.LOGITS, when=When(among=SOME))
        turn = driver.turn(session, START, COUNT)
        place, last = (point, layer), (Point.LOGITS, layer)  # hooks of one layer, and one on the model
        tokens = [*START, *turn.tokens][: len(START) + COUNT - 1]
        logits = wanted(tiny, tokens, {place, last}, place)[last]
        found = torch.cat([tensor_of(record.tensor) for record in driver.captures(session).records])
        assert turn.tokens == logits[len(START) - 1 :].argmax(-1).tolist(), place
        close(place, found, logits[list(positions_of(SOME))])
        driver.close(session)


def test_a_turn_that_pauses_and_loses_its_kv_says_the_same(tiny: TinyModel) -> None:
    """Beside another one, whose tokens do not change. Edits before and behind the pause are made once."""
    blocks = 120 if tiny.oracle.config.model_type == "mamba2" else 20  # it keeps states alone, and its blocks are small
    driver = BreakDriver(tiny.engine(blocks=blocks))
    edited = driver.open()
    for point in (Point.RESID_PRE, Point.MLP_OUT):
        driver.arm(edited, LAYER, action=Action.EDIT, edits=(QUARTER,), point=point)
    expected = driver.turn(edited, START, COUNT).tokens
    plain = driver.turn(driver.open(), START, COUNT).tokens
    assert plain != expected
    for lose, ((point, layer), shape) in enumerate(shapes_of(tiny).items()):
        if not ABOUT[point].pauses:
            continue
        session, other = driver.open(), driver.begin(driver.open(), START, COUNT)
        for each in (Point.RESID_PRE, Point.MLP_OUT):
            driver.arm(session, LAYER, action=Action.EDIT, edits=(QUARTER,), point=each)
        may_wait = lose % 2 and not driver.engine.info.state_bytes
        holds = Gate(data_of(torch.zeros(shape.width)), above=-1.0) if may_wait else None
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
        assert turn.tokens == expected, (point, layer)
        driver.settle(other)
        assert other.tokens == plain
        driver.close(session)
        driver.close(other.session)


def test_the_table_of_families_is_that_of_the_registry() -> None:
    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in found)

    page, found = Path("docs/breakpoints.md").read_text(), dict[frozenset[Point], list[str]]()
    for name in sorted(OURS):  # as a config may be: with experts in all layers, and with layers without
        configs = ({**CASES[CASE_OF[name]], **more} for more in ({}, {"mlp_only_layers": [0], "num_local_experts": 0}))
        has = (points_of(AutoConfig.for_model(**config)) for config in configs)
        found.setdefault(frozenset[Point]().union(*has), []).append(name)
    assert set(OURS) <= set(CASE_OF)
    for points, families in found.items():
        assert f"| {names(families)} | {names(point for point in Point if point not in points) or 'nothing'} |" in page

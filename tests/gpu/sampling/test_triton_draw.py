"""The draw that sorts nothing, beside one that sorts: in whole numbers, so that both have the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.gpu.sampling.inputs import Draws, Truncation
from tests.gpu.attention.drawing import needs_triton

pytestmark = needs_triton

LAST_UNIFORM = 1 - 2**-53
"""The largest that there is."""


def sorted_draw(probabilities: NDArray[np.float32], uniform: float, top_k: int, top_p: float, min_p: float) -> int:
    """`top_k`, `top_p` and `min_p` one after the other, over the tokens sorted by probability and id."""
    order = np.lexsort((np.arange(len(probabilities)), -probabilities))
    values = probabilities[order]
    masses = [int(value * 2.0**60) for value in values.astype(float)]
    total = sum(masses[:top_k])
    left, before = list[int](), 0
    for value, mass in zip(values[:top_k].tolist(), masses, strict=False):
        share = np.ceil(float(np.float32(top_p)) * float(total))
        if left and ((top_p < 1 and before >= share) or value < np.float32(min_p) * values[0]):
            break
        left.append(mass)
        before += mass
    target = min(int(uniform * float(before)), before - 1)
    return int(order[np.searchsorted(np.cumsum(left), target, side="right")])


def drawn(rows: torch.Tensor, uniforms: list[float], limits: list[tuple[int, float, float]]) -> list[int]:
    from app.gpu.sampling.triton_draw import draw

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    top_k, top_p, min_p = zip(*limits, strict=True)
    draws = Draws(torch.arange(len(rows)), column(uniforms, torch.float64), column([1.0] * len(rows), torch.float32))
    truncation = Truncation(
        column(list(top_k), torch.int64), column(list(top_p), torch.float32), column(list(min_p), torch.float32)
    )
    return draw(rows, draws, truncation).tolist()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 7, 1023, 1024, 1025, 2500]),
    steepness=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    in_steps=st.booleans(),
    uniform=st.sampled_from([0.0, LAST_UNIFORM]) | st.floats(0, LAST_UNIFORM),
    top_k=st.sampled_from([1, 2, 40, 1024, 2500]),
    top_p=st.sampled_from([1e-6, 0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
)
def test_it_draws_what_a_sort_would_find(
    seed: int,
    vocab_size: int,
    steepness: float,
    in_steps: bool,
    uniform: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """`in_steps`: many tokens have the same probability."""
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * steepness
    probabilities = torch.softmax(logits.round() if in_steps else logits, -1)
    limits = min(top_k, vocab_size), top_p, min_p
    expected = sorted_draw(probabilities[0].numpy(), uniform, *limits)
    assert drawn(probabilities, [uniform], [limits]) == [expected]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 1023, 1024, 1025, 2500]),
    steepness=st.sampled_from([0.0, 3.0, 30.0]),
    uniform=st.sampled_from([0.0, LAST_UNIFORM]) | st.floats(0, LAST_UNIFORM),
)
def test_a_free_draw_goes_through_the_tokens_by_their_ids(
    seed: int, vocab_size: int, steepness: float, uniform: float
) -> None:
    from app.gpu.sampling.triton_draw import draw_any

    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * steepness
    probabilities = torch.softmax(logits, -1)
    masses = np.cumsum([int(value * 2.0**60) for value in probabilities[0].tolist()])
    target = min(int(uniform * float(masses[-1])), int(masses[-1]) - 1)
    draws = Draws(torch.arange(1), torch.tensor([[uniform]], dtype=torch.float64), torch.ones(1, 1))
    assert draw_any(probabilities, draws).tolist() == [np.searchsorted(masses, target, side="right")]


def test_tokens_of_one_probability_are_taken_by_their_ids() -> None:
    probabilities = torch.full((1, 2000), 1 / 2000)
    for uniform, expected in ((0.0, 0), (0.5, 5), (0.99, 9)):
        assert drawn(probabilities, [uniform], [(10, 1.0, 0.0)]) == [expected]


def test_each_row_has_its_own_limits() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2]).expand(3, 3).contiguous()
    limits = [(3, 1.0, 0.0), (2, 1.0, 0.0), (3, 0.4, 0.0)]
    assert drawn(probabilities, [0.95] * 3, limits) == [2, 1, 0]


@pytest.mark.parametrize("vocab_size", [1, 1000, 2500])
def test_a_row_without_numbers_draws_a_token_of_the_vocabulary(vocab_size: int) -> None:
    from app.gpu.sampling.triton_draw import draw_any

    rows = torch.full((1, vocab_size), torch.nan)
    draws = Draws(torch.arange(1), torch.full((1, 1), 0.7, dtype=torch.float64), torch.ones(1, 1))
    assert 0 <= draw_any(rows, draws).item() < vocab_size
    for limits in ((vocab_size, 1.0, 0.0), (1, 0.5, 0.5), (vocab_size, 0.9, 0.0)):
        assert 0 <= drawn(rows, [0.7], [limits])[0] < vocab_size


@pytest.mark.parametrize("uniform", [0.0, LAST_UNIFORM])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    probabilities = torch.tensor([[0.0, 1.0, 0.0]])
    assert drawn(probabilities, [uniform], [(3, 1.0, 0.0)]) == [1]

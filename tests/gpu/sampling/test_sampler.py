"""The sampler against Transformers' logits processors and NumPy's random numbers. A draw that sorts nothing gives the
tokens of one that sorts.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from app.domain.values import SamplingParams
from app.gpu.device.streams import CpuStreams
from app.gpu.forward.results import LaunchedStep
from app.gpu.sampling import Sampled, SampleRequest
from app.gpu.sampling.sampler import CANDIDATES, log_probabilities, uniforms
from app.gpu.state.sequence import TokenCounts
from tests.gpu.kernels.attention.drawing import needs_triton

VOCAB = 2000


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def request(
    params: SamplingParams, tokens: list[int], prompt_tokens: int | None = None, forbidden: frozenset[int] = frozenset()
) -> SampleRequest:
    prompt_length = len(tokens) if prompt_tokens is None else prompt_tokens
    seen = TokenCounts(prompt_length).seen(tokens)
    return SampleRequest(params, forbidden, position=len(tokens), seen=seen)


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest], *, on_host: bool = True) -> list[Sampled]:
    """One token per row; `on_host=False` as on a device whose results would have to be waited for."""
    streams = CpuStreams()
    streams.on_host = on_host
    step = LaunchedStep([], requests, VOCAB, streams, torch.from_numpy, ThreadPoolExecutor(1))
    step.launch(logits)
    return step.sampled()


def draw_many(logits: torch.Tensor, count: int, params: SamplingParams, tokens: list[int]) -> Counter[int]:
    """Draw `count` tokens from one row of logits, each as if at another position."""
    rows = logits.expand(count, -1).clone()
    requests = [request(params, [*tokens, *[tokens[-1]] * i]) for i in range(count)]
    return Counter(sampled.token_id for sampled in sample(rows, requests))


@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 5, 1500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.5, 1.0, 5.0]),
)
def test_only_tokens_that_transformers_would_leave_are_drawn(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = random_logits(seed)
    ids = torch.zeros(1, 1, dtype=torch.long)
    left = logits / temperature
    warpers: list[LogitsProcessor] = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        left = warper(ids, left)
    allowed = set(left[0].isfinite().nonzero().flatten().tolist())
    params = SamplingParams(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = draw_many(logits, 30, params, [1])
    assert set(drawn) <= allowed


@settings(max_examples=settings().max_examples // 3)  # Triton's draw, interpreted, takes long
@given(
    seed=st.integers(0, 1000),
    limits=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 40, CANDIDATES, CANDIDATES + 1, VOCAB, VOCAB + 1]),
            st.sampled_from([1.0, 0.95, 0.5]),
            st.sampled_from([0.0, 0.001, 0.2]),
            st.sampled_from([0.0, 0.7, 5.0]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_a_row_draws_the_same_alone_and_in_company_on_a_cpu_and_elsewhere(
    seed: int, limits: list[tuple[int, float, float, float]]
) -> None:
    logits = random_logits(seed, rows=len(limits))
    requests = [
        request(SamplingParams(seed=seed + i, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature), [1, 2])
        for i, (top_k, top_p, min_p, temperature) in enumerate(limits)
    ]
    together = sample(logits.clone(), requests)
    alone = [sample(logits[i : i + 1].clone(), [each])[0] for i, each in enumerate(requests)]
    assert together == alone
    assert sample(logits.clone(), requests, on_host=False) == alone


def test_draws_follow_the_softmax() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [7, 8, 9]] = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = draw_many(logits, 4000, SamplingParams(seed=3), [1])
    assert drawn[7] / 4000 == pytest.approx(0.5, abs=0.04)
    assert drawn[8] / 4000 == pytest.approx(0.3, abs=0.04)
    assert drawn[9] / 4000 == pytest.approx(0.2, abs=0.04)


def test_repetition_penalty_is_the_one_of_transformers() -> None:
    tokens = [3, 3, 5, 8]
    logits = random_logits(7)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits.clone())
    sample(logits, [request(SamplingParams(seed=0, temperature=0, repetition_penalty=1.3), tokens)])
    assert torch.equal(logits, expected)


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    """The formula of the OpenAI API reference: `logit - count * frequency - (count > 0) * presence`."""
    logits = random_logits(8)
    expected = logits.clone()
    expected[0, 4] -= 2 * 0.5 + 0.25
    expected[0, 6] -= 1 * 0.5 + 0.25
    params = SamplingParams(seed=0, temperature=0, frequency_penalty=0.5, presence_penalty=0.25)
    sample(logits, [request(params, [4, 9, 9, 4, 6, 4], prompt_tokens=3)])
    torch.testing.assert_close(logits, expected)


def test_bias_and_forbidden_tokens() -> None:
    params = SamplingParams(seed=0, temperature=0, logit_bias={11: 100.0, 12: 90.0})
    assert sample(random_logits(9), [request(params, [1])])[0].token_id == 11
    assert sample(random_logits(9), [request(params, [1], forbidden=frozenset({11}))])[0].token_id == 12


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(10)
    expected = torch.log_softmax(logits, dim=-1)[0]
    params = SamplingParams(seed=0, temperature=0, logit_bias={11: 100.0}, logprobs=3)
    [sampled] = sample(logits.clone(), [request(params, [1])])
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[11]))
    assert [token for token, _ in sampled.logprobs.top] == expected.topk(3).indices.tolist()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab_size", [67, 5001, 49152, 50257, 128258])
def test_the_bits_of_a_row_do_not_depend_on_its_place(vocab_size: int) -> None:
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    found = log_probabilities(row.cuda().repeat(9, 1))
    assert found.shape == (9, vocab_size)
    assert torch.equal(found, found[:1].expand(9, -1))
    torch.testing.assert_close(found[0].cpu().double(), torch.log_softmax(row.double(), dim=-1), rtol=1e-5, atol=1e-5)


LARGEST = (2**128 - 1, 2**64 - 2)


@given(st.lists(st.tuples(st.integers(0, LARGEST[0]), st.integers(0, LARGEST[1])), min_size=1, max_size=20))
@example([LARGEST, LARGEST, (0, 0), LARGEST])
@example([(seed, 1000 + seed) for seed in range(300)])
def test_each_random_number_is_that_of_numpys_generator(pairs: list[tuple[int, int]]) -> None:
    wanted = [np.random.Generator(np.random.Philox(key=key, counter=counter)).random() for key, counter in pairs]
    assert uniforms([key for key, _ in pairs], [counter for _, counter in pairs]).tolist() == wanted


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
    return draw(
        rows,
        column(uniforms, torch.float64),
        column(list(top_k), torch.int64),
        column(list(top_p), torch.float32),
        column(list(min_p), torch.float32),
    ).tolist()


@needs_triton
@settings(max_examples=settings().max_examples // 2)  # each takes long in the interpreter
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 7, 1023, 1024, 1025, 2500]),
    steepness=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    in_steps=st.booleans(),
    uniform=st.sampled_from([0.0, LAST_UNIFORM]) | st.floats(0, LAST_UNIFORM),
    top_k=st.sampled_from([1, 2, 40, 1024, 2500]),
    top_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
)
def test_it_draws_what_a_sort_would_find(
    seed: int, vocab_size: int, steepness: float, in_steps: bool, uniform: float, top_k: int, top_p: float, min_p: float
) -> None:
    """`in_steps`: many tokens have the same probability."""
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * steepness
    probabilities = torch.softmax(logits.round() if in_steps else logits, -1)
    limits = min(top_k, vocab_size), top_p, min_p
    expected = sorted_draw(probabilities[0].numpy(), uniform, *limits)
    assert drawn(probabilities, [uniform], [limits]) == [expected]


@needs_triton
@pytest.mark.parametrize("vocab_size", [1, 2500])
def test_a_row_without_numbers_draws_a_token_of_the_vocabulary(vocab_size: int) -> None:
    from app.gpu.sampling.triton_draw import draw

    rows = torch.full((1, vocab_size), torch.nan)
    assert 0 <= draw(rows, torch.full((1, 1), 0.7, dtype=torch.float64)).item() < vocab_size
    for limits in ((vocab_size, 1.0, 0.0), (1, 0.5, 0.5), (vocab_size, 0.9, 0.0)):
        assert 0 <= drawn(rows, [0.7], [limits])[0] < vocab_size

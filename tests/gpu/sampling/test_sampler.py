"""The sampler against Transformers' own logits processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from app.domain.values import SamplingParams
from app.gpu.device.staging import Download
from app.gpu.device.streams import CpuStreams
from app.gpu.sampling.logprobs import Report, log_probabilities
from app.gpu.sampling.requests import Sampled, SampleRequest
from app.gpu.sampling.sampler import CANDIDATES
from app.gpu.step.results import Sampling

VOCAB = 2000


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def request(
    params: SamplingParams,
    tokens: list[int],
    prompt_tokens: int | None = None,
    forbidden: frozenset[int] = frozenset(),
) -> SampleRequest:
    prompt_length = len(tokens) if prompt_tokens is None else prompt_tokens
    return SampleRequest(params, tokens, prompt_length, forbidden, position=len(tokens))


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest], *, on_host: bool = True) -> list[Sampled]:
    """One token per row; `on_host=False` as on a device whose results would have to be waited for."""
    sampling = Sampling(requests, None, VOCAB, torch.from_numpy)
    sampling.launch(logits, Download(CpuStreams()), on_host=on_host)
    return sampling.read()


def draw_many(logits: torch.Tensor, count: int, params: SamplingParams, tokens: list[int]) -> Counter[int]:
    """Draw `count` tokens from one row of logits, each as if at another position."""
    rows = logits.expand(count, -1).clone()
    requests = [request(params, [*tokens, *[tokens[-1]] * i]) for i in range(count)]
    return Counter(sampled.token_id for sampled in sample(rows, requests))


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = random_logits(0, rows=5)
    expected = logits.argmax(dim=-1).tolist()
    chosen = sample(logits.clone(), [request(SamplingParams(seed=1, temperature=0), [1, 2])] * 5)
    assert [sampled.token_id for sampled in chosen] == expected


@settings(max_examples=40)
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


@settings(max_examples=20)
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


def test_a_seed_repeats_its_draw_and_another_seed_does_not() -> None:
    logits = random_logits(4, rows=20)
    requests = [request(SamplingParams(seed=5), [1] * (i + 1)) for i in range(20)]
    others = [request(SamplingParams(seed=6), [1] * (i + 1)) for i in range(20)]
    first = sample(logits.clone(), requests)
    assert sample(logits.clone(), requests) == first
    assert sample(logits.clone(), others) != first


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


def test_rows_without_logprobs_stay_without() -> None:
    plain = SamplingParams(seed=0, temperature=0)
    asking = SamplingParams(seed=0, temperature=0, logprobs=0)
    first, second = sample(random_logits(11, rows=2), [request(plain, [1]), request(asking, [1])])
    assert first == Sampled(first.token_id, None)
    assert second.logprobs is not None
    assert second.logprobs.top == ()


def test_prompt_scores_are_the_log_softmax_at_the_next_token() -> None:
    logits = random_logits(12, rows=3)
    expected = torch.log_softmax(logits, dim=-1)
    scored = Report(log_probabilities(logits), torch.tensor([5, 6, 7]), [2, 2, 2], Download(CpuStreams())).read()
    assert [entry.logprob for entry in scored] == pytest.approx([float(expected[i, 5 + i]) for i in range(3)])
    assert [entry.top[0][0] for entry in scored] == expected.argmax(dim=-1).tolist()

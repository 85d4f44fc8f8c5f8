"""Prompts: exact lengths, no token used twice, no shared prefix."""

import pytest

from benchmarks.peers.workload import FULL, LONG_PROMPT_TOKENS, Workload, build_workload

TEXT = list(range(40_000))


def all_prompts(workload: Workload) -> list[list[int]]:
    decode = [prompt for batch in workload.decode for prompt in batch]
    return [*workload.warm_up, workload.warm_up_long, *decode, *workload.long]


def test_there_is_one_prompt_for_every_stream() -> None:
    workload = build_workload(FULL, TEXT)

    assert [len(batch) for batch in workload.decode] == [1, 8, 32]
    assert [len(prompt) for prompt in workload.long] == [LONG_PROMPT_TOKENS] * FULL.long_prompts


def test_short_prompts_are_ragged_around_100_tokens() -> None:
    lengths = [len(prompt) for prompt in build_workload(FULL, TEXT).decode[-1]]

    assert sum(lengths) / len(lengths) == pytest.approx(100, abs=1)
    assert len(set(lengths)) > len(lengths) / 2


def test_no_part_of_the_text_is_asked_twice() -> None:
    tokens = [token for prompt in all_prompts(build_workload(FULL, TEXT)) for token in prompt]

    assert len(tokens) == len(set(tokens))


def test_the_same_text_gives_the_same_workload() -> None:
    assert build_workload(FULL, TEXT) == build_workload(FULL, TEXT)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="500 tokens"):
        build_workload(FULL, TEXT[:500])


def test_prompts_that_a_prefix_cache_could_share_are_refused() -> None:
    with pytest.raises(ValueError, match="share their first"):
        build_workload(FULL, [7] * 40_000)

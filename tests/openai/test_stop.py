"""Stop strings: the text ends before them, wherever the tokens' borders are, and so does what a stream shows."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.openai.conftest import MODEL

PROMPT = "Say something"
LENGTH = 60


@pytest.fixture
def full(sdk: openai.OpenAI) -> tuple[list[str], str]:
    """What the model says when nothing stops it: its tokens, and the text."""
    choice = sdk.completions.create(
        model=MODEL, prompt=PROMPT, seed=21, max_tokens=LENGTH, logprobs=0, extra_body={"ignore_eos": True}
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    return choice.logprobs.tokens, choice.text


def stopped_by(sdk: openai.OpenAI, stop: str | list[str]) -> tuple[str, str | None, list[str]]:
    """Text and finish reason of the same with `stop`, plain, and the pieces of the streamed text."""
    asked: Any = {"model": MODEL, "prompt": PROMPT, "seed": 21, "max_tokens": LENGTH, "stop": stop}
    asked["extra_body"] = {"ignore_eos": True}
    plain = sdk.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0].text for chunk in sdk.completions.create(**asked, stream=True)]
    return plain.text, plain.finish_reason, pieces


def across_a_border(tokens: list[str], at: int) -> str:
    """A string that ends inside a token after `at` and begins inside the one before."""
    first, second = next(
        pair
        for pair in zip(tokens[at:], tokens[at + 1 :], strict=False)
        if all(len(token) > 2 and token.startswith("<") for token in pair)
    )
    return first[-2:] + second[:2]


def test_a_stop_string_across_tokens_cuts_the_text_before_it(sdk: openai.OpenAI, full: tuple[list[str], str]) -> None:
    tokens, text = full
    stop = across_a_border(tokens, at=15)
    cut, reason, pieces = stopped_by(sdk, stop)
    assert cut == text[: text.index(stop)]
    assert reason == "stop"
    assert "".join(pieces) == cut


def test_the_first_of_several_stop_strings_counts(sdk: openai.OpenAI, full: tuple[list[str], str]) -> None:
    tokens, text = full
    stops = [across_a_border(tokens, at=25), across_a_border(tokens, at=10)]
    cut, _, pieces = stopped_by(sdk, stops)
    assert cut == text[: min(text.index(stop) for stop in stops)]
    assert "".join(pieces) == cut


def test_a_stop_string_that_never_comes_changes_nothing(sdk: openai.OpenAI, full: tuple[list[str], str]) -> None:
    tokens, text = full
    stop = tokens[-1][:-1] + "~" if len(tokens[-1]) > 1 else tokens[-1] + "~~"
    cut, reason, pieces = stopped_by(sdk, stop)
    assert cut == text == "".join(pieces)
    assert reason == "length"


def test_usage_counts_up_to_the_token_that_completed_the_match(sdk: openai.OpenAI, full: tuple[list[str], str]) -> None:
    tokens, _ = full
    stop = across_a_border(tokens, at=15)
    answer = sdk.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=21,
        max_tokens=LENGTH,
        stop=stop,
        logprobs=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    kept = answer.usage.completion_tokens
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == tokens[:kept]
    assert kept < LENGTH

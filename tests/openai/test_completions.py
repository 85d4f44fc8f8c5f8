"""`/v1/completions` through the official SDK, against Transformers."""

from typing import Any

import httpx
import pytest

from tests.openai.conftest import MODEL
from tests.openai.reference import Reference

PROMPT = "Once upon a time"
EVERY_LIST = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def logprobs_of(answer: Any, index: int = 0) -> Any:
    return answer.choices[index].logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_text_and_token_ids_are_those_of_transformers(sdk: Any, reference: Reference, stream: bool) -> None:
    expected = reference.greedy(reference.encode(PROMPT), 20)
    wanted: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    answer: Any = sdk.completions.create(**wanted, stream=stream, extra_body={"return_token_ids": True})
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    found = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids") or ()]
    assert found == expected
    assert "".join(choice.text for choice in choices) == reference.decode(expected)
    assert choices[-1].finish_reason == "length"
    plain = sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert plain.id.startswith("cmpl-")
    assert "token_ids" not in (plain.choices[0].model_extra or {})


def test_token_ids_are_a_prompt_as_they_are_and_sixteen_tokens_the_default(sdk: Any, reference: Reference) -> None:
    token_ids, asked = reference.encode(PROMPT), {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
    by_text, by_ids = (sdk.completions.create(**asked, prompt=prompt) for prompt in (PROMPT, token_ids))
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert (by_ids.usage.prompt_tokens, by_ids.usage.completion_tokens) == (len(token_ids), 16)


@pytest.mark.parametrize("as_token_ids", [False, True])
def test_a_batch_has_n_choices_per_prompt_in_order(sdk: Any, reference: Reference, as_token_ids: bool) -> None:
    texts = ["One", "Two, three", "Four"]
    prompts: Any = [reference.encode(text) for text in texts] if as_token_ids else texts
    answer = sdk.completions.create(model=MODEL, prompt=prompts, n=2, temperature=0, max_tokens=10)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    expected = [reference.decode(reference.greedy(reference.encode(text), 10)) for text in texts]
    assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(len(reference.encode(text)) for text in texts)
    assert answer.usage.completion_tokens == 60


def test_an_echo_is_scored_as_transformers_scores_it(sdk: Any, reference: Reference) -> None:
    """The call that evaluation harnesses make: what is the likelihood of this text."""
    token_ids = reference.encode(PROMPT)
    expected = reference.logprobs(token_ids)
    answer = sdk.completions.create(model=MODEL, prompt=token_ids, echo=True, logprobs=1, max_tokens=0, temperature=0)
    assert answer.choices[0].text == PROMPT
    found = logprobs_of(answer)
    scores: Any = found.token_logprobs
    tops: Any = found.top_logprobs
    assert (scores[0], tops[0]) == (None, None)
    target = [float(row[token_id]) for row, token_id in zip(expected, token_ids[1:], strict=False)]
    assert scores[1:] == pytest.approx(target, abs=1e-3)
    assert [max(top.values()) for top in tops[1:]] == pytest.approx(expected[:-1].max(-1).values.tolist(), abs=1e-3)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(token_ids), 0)


def test_an_echo_with_more_tokens_goes_on_where_the_prompt_ends(sdk: Any, reference: Reference) -> None:
    asked: Any = {"model": MODEL, "prompt": [PROMPT, "Twice"], "logprobs": 2, "max_tokens": 6, "seed": 3, "n": 2}
    asked["extra_body"] = {"ignore_eos": True}
    with_echo, without = (sdk.completions.create(**asked, echo=echo) for echo in (True, False))
    for index, prompt in enumerate([PROMPT, PROMPT, "Twice", "Twice"]):
        assert with_echo.choices[index].text == prompt + without.choices[index].text
        scores: Any = logprobs_of(with_echo, index).token_logprobs
        assert scores[-6:] == pytest.approx(logprobs_of(without, index).token_logprobs, abs=1e-3)
        assert len(scores) == len(reference.encode(prompt)) + 6


def test_text_offsets_point_at_the_tokens(sdk: Any) -> None:
    answer = sdk.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=0, max_tokens=12, seed=8)
    found = logprobs_of(answer)
    text = answer.choices[0].text
    assert found.text_offset == sorted(found.text_offset)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith(("bytes:", "<bos>")):
            # Bytes before it that turned out to be no character were decided together with it.
            assert text[offset:].lstrip("\N{REPLACEMENT CHARACTER}").startswith(token)


@pytest.mark.parametrize(("max_tokens", "text"), [(1, "a€"), (0, "a\N{REPLACEMENT CHARACTER}")])
def test_an_echo_has_a_character_whole_that_the_prompt_begins(sdk: Any, max_tokens: int, text: str) -> None:
    bias = {"172": 100}  # the last byte of the euro sign
    asked: Any = {"model": MODEL, "prompt": [97, 226, 130], "max_tokens": max_tokens, "logit_bias": bias, "echo": True}
    assert sdk.completions.create(**asked).choices[0].text == text
    assert "".join(chunk.choices[0].text for chunk in sdk.completions.create(**asked, stream=True)) == text
    [choice] = sdk.completions.create(**asked, logprobs=0).choices
    assert (choice.text, choice.logprobs.text_offset) == (text, [0, 1, 1, 1][: 3 + max_tokens])
    if max_tokens:
        without = sdk.completions.create(**{**asked, "echo": False})
        assert without.choices[0].text == "\N{REPLACEMENT CHARACTER}"


def test_a_stream_is_the_plain_answer_in_pieces(sdk: Any) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "logprobs": 2, "max_tokens": 12, "seed": 6, "echo": True}
    plain = sdk.completions.create(**asked)
    *chunks, last = sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    for name in EVERY_LIST:
        streamed = [entry for piece in pieces if piece is not None for entry in getattr(piece, name)]
        assert streamed == getattr(logprobs_of(plain), name)
    assert last.usage.total_tokens == plain.usage.total_tokens


def test_each_choice_tells_what_it_has_cost_so_far(sdk: Any) -> None:
    """`continuous_usage_stats` is vLLM's; GuideLLM sends it with every request."""
    prompts = [[65, 66, 67], [68, 69]]
    asked: Any = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = sdk.completions.create(**asked, stream=True, stream_options=options)
    for index in range(4):
        usages = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert {usage.prompt_tokens for usage in usages} == {len(prompts[index // 2])}
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 24)


def test_the_prompt_of_many_choices_is_computed_once(sdk: Any, http: httpx.Client) -> None:
    prompt = "This prompt is long enough to fill several blocks of the cache. " * 4

    def tokens_computed() -> float:
        values = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
        return float(values["djinn_prefix_cache_queries_total"]) - float(values["djinn_prefix_cache_hits_total"])

    before = tokens_computed()
    answer = sdk.completions.create(model=MODEL, prompt=prompt, n=4, max_tokens=4)
    block_tokens = 16
    assert tokens_computed() - before <= answer.usage.prompt_tokens + 3 * block_tokens


def test_a_second_call_finds_the_prompt_in_the_cache(sdk: Any) -> None:
    prompt = "A prefix that two calls share, and that nobody else has sent before. " * 2
    first, second = (sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 16 * 16


@pytest.mark.parametrize("stop", [{"stop_token_ids": [90]}, {"stop": ["Z"]}])
def test_a_stop_ends_the_text_unless_it_comes_too_early(sdk: Any, stop: dict[str, Any]) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "logit_bias": {"90": 100}, "max_tokens": 9}
    assert sdk.completions.create(**asked).choices[0].text == "Z" * 9
    for least, count in ((0, 1), (4, 4)):
        answer = sdk.completions.create(**asked, extra_body={**stop, "min_tokens": least})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", count)


def test_the_end_token_ends_the_text_unless_ignored(sdk: Any, reference: Reference) -> None:
    bias = {str(reference.tokenizer.eos_token_id): 100}
    for ignored, reason, count in ((False, "stop", 1), (True, "length", 5)):
        asked: Any = {"model": MODEL, "prompt": PROMPT, "logit_bias": bias, "max_tokens": 5}
        answer = sdk.completions.create(**asked, extra_body={"ignore_eos": ignored})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == (reason, count)
        assert answer.choices[0].text == "" or ignored


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(sdk: Any, narrow: dict[str, float]) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10}
    greedy = sdk.completions.create(**asked, temperature=0)
    filtered = sdk.completions.create(**asked, extra_body=narrow)
    assert filtered.choices[0].text == greedy.choices[0].text


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 10}])
def test_penalties_keep_tokens_from_coming_again(sdk: Any, penalty: dict[str, float]) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    asked["logit_bias"] = {"90": 3, "89": 2, "88": 1}
    repeated, penalised = (sdk.completions.create(**asked, extra_body=body) for body in ({}, penalty))
    assert len(set(logprobs_of(penalised).tokens)) > len(set(logprobs_of(repeated).tokens))


# Stop strings: the text ends before them, wherever the tokens' borders are, and so does what a stream shows.

STOPPED: Any = {"model": MODEL, "prompt": "Say something", "seed": 21, "max_tokens": 60, "logprobs": 0}
STOPPED["extra_body"] = {"ignore_eos": True}


@pytest.fixture
def full(sdk: Any) -> Any:
    """What the model says when nothing stops it: a choice with its tokens and the text."""
    return sdk.completions.create(**STOPPED).choices[0]


def across_a_border(tokens: list[str], at: int) -> str:
    """A string that ends inside a token after `at` and begins inside the one before."""
    first, second = next(
        pair
        for pair in zip(tokens[at:], tokens[at + 1 :], strict=False)
        if all(len(token) > 2 and token.startswith("<") for token in pair)
    )
    return first[-2:] + second[:2]


@pytest.mark.parametrize("places", [[15], [25, 10]])
def test_the_first_stop_string_cuts_the_text_before_it(sdk: Any, full: Any, places: list[int]) -> None:
    stops = [across_a_border(full.logprobs.tokens, at) for at in places]
    answer = sdk.completions.create(**STOPPED, stop=stops)
    [choice] = answer.choices
    assert choice.text == full.text[: min(full.text.index(stop) for stop in stops)]
    assert choice.finish_reason == "stop"
    assert choice.logprobs.tokens == full.logprobs.tokens[: answer.usage.completion_tokens]
    assert answer.usage.completion_tokens < STOPPED["max_tokens"]  # up to the token that completed the match
    chunks = sdk.completions.create(**STOPPED, stop=stops, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text

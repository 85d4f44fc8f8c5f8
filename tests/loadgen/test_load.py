"""A load: what its workload decides ahead, the file of its trace, and its texts."""

import asyncio
import hashlib
import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

from loadgen.errors import LoadgenError
from loadgen.load.arrivals import Arrivals, arrival_times
from loadgen.load.corpus import Corpus, python_topics, read_texts
from loadgen.load.prompts import TokenIds, Tokenize, cut_prompts, fingerprint, fresh_prompts
from loadgen.load.think import LogNormal, Uniform, parse_think
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, read_trace, scaled, trace_sha256, write_trace
from loadgen.load.workload import Replay, Workload, plan_trace

workloads = st.builds(
    Workload,
    agents=st.integers(1, 30),
    rate=st.floats(0.01, 1000),
    turns=st.integers(1, 6),
    think=st.builds(Uniform, st.floats(0, 10), st.floats(10, 20)),
    eta_noise=st.just(0.0) | st.floats(0, 2),
    tool_share=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    time_scale=st.floats(0.01, 10),
)


def earlier_turns(trace: Trace) -> list[TurnPlan]:
    """Those that another turn follows."""
    return [turn for agent in trace for turn in agent.turns[:-1]]


BASE = Workload(40, turns=4, tool_share=0.5, eta_noise=0.2)


def test_noise_is_a_lognormal_factor() -> None:
    """Mean and deviation of its logarithm; 4 standard errors of 6,000 samples."""
    turns = earlier_turns(plan_trace(Workload(2000, turns=4, eta_noise=0.5, think=Uniform(5, 9))))
    logs = [math.log(turn.announced_s / turn.think_s) for turn in turns if turn.announced_s and turn.think_s]
    assert len(logs) == 6000
    assert np.mean(logs) == pytest.approx(0.0, abs=4 * 0.5 / math.sqrt(6000))
    assert np.std(logs) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * 6000))


def test_a_replayed_trace_is_what_is_in_the_file_and_its_prompts_have_room_for_the_system_text(tmp_path: Path) -> None:
    trace = plan_trace(BASE)
    write_trace(trace, tmp_path / "trace.jsonl")
    assert plan_trace(Replay(trace=tmp_path / "trace.jsonl")) == trace
    assert plan_trace(Replay(trace=tmp_path / "trace.jsonl", time_scale=0.5)) == scaled(trace, 0.5)
    short = AgentPlan(0.0, (TurnPlan(20, 1, None, None, tool=False),))
    write_trace((*trace[:3], short), tmp_path / "short.jsonl")
    with pytest.raises(LoadgenError, match="must be less than the 20 tokens with which agent 3"):
        plan_trace(Replay(trace=tmp_path / "short.jsonl", system_tokens=20))


@given(workloads)
def test_every_turn_is_as_the_workload_has_it(workload: Workload) -> None:
    assert isinstance(workload.think, Uniform)
    low, high = workload.time_scale * workload.think.low, workload.time_scale * workload.think.high
    for agent in plan_trace(workload):
        new = [turn.new_tokens for turn in agent.turns]
        assert new == [workload.context, *(workload.turns - 1) * [workload.resume_tokens]]
        for turn in agent.turns[:-1]:
            assert turn.think_s is not None
            assert turn.announced_s is not None
            assert turn.tool or low <= turn.think_s <= high * (1 + 1e-9)
            assert workload.eta_noise or turn.announced_s == turn.think_s
            expected = workload.tool_completion_tokens if turn.tool else workload.completion_tokens
            assert turn.completion_tokens == expected
        assert (agent.turns[-1].think_s, agent.turns[-1].announced_s, agent.turns[-1].tool) == (None, None, False)


OTHER_AGENTS: list[dict[str, Any]] = [{"turns": 9}, {"think": LogNormal(3.0, 1.0)}, {"tool_share": 0.0}]
OTHER_TIMES: list[dict[str, Any]] = [{"arrivals": Arrivals.GAMMA, "burstiness": 0.3}, {"eta_noise": 1.0}]


def test_what_decides_arrivals_does_not_decide_pauses_and_tools_nor_the_reverse() -> None:
    plain = plan_trace(BASE)
    for other in OTHER_AGENTS:
        assert [agent.arrival_s for agent in plan_trace(replace(BASE, **other))] == [each.arrival_s for each in plain]
    for other in OTHER_TIMES:
        before, after = (earlier_turns(trace) for trace in (plain, plan_trace(replace(BASE, **other))))
        assert [(turn.think_s, turn.tool) for turn in before] == [(turn.think_s, turn.tool) for turn in after]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"agents": 0}, "agents"),
        ({"rate": math.nan}, "rate"),
        ({"tool_share": 1.1}, "tool_share"),
        ({"context": 64}, "context must be above system_tokens, which is 128; got 64"),
        ({"burstiness": 2.0}, "burstiness has no effect, because arrivals is not gamma"),
        ({"tool_think": Uniform(1, 2)}, "tool_think has no effect, because tool_share is 0"),
    ],
)
def test_a_value_out_of_range_or_without_effect_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadgenError, match=named):
        Workload(**wrong)


# When agents come, and how long they think.

SAMPLES = 4000


def times(arrivals: Arrivals, agents: int, rate: float, burstiness: float = 1.0) -> tuple[float, ...]:
    return arrival_times(arrivals, agents, rate, burstiness, np.random.default_rng(7))


def gaps(arrivals: Arrivals, rate: float, burstiness: float = 1.0) -> NDArray[np.float64]:
    """Ascending."""
    return np.sort(np.diff(times(arrivals, SAMPLES, rate, burstiness), prepend=0.0))


def passes_kolmogorov_smirnov(samples: NDArray[np.float64], cdf: NDArray[np.float64]) -> bool:
    """Whether ascending samples fit their distribution function, at 1 %: the asymptotic critical value is 1.63 / √n."""
    steps = np.arange(samples.size + 1) / samples.size
    distance = max(np.max(steps[1:] - cdf), np.max(cdf - steps[:-1]))
    return bool(distance < 1.63 / math.sqrt(samples.size))


def erlang_cdf(shape: int, rate: float, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the gamma distribution with a whole shape: 1 - exp(-x) times the first `shape` terms of exp(x)."""
    x = shape * rate * seconds
    terms = [x**k / math.factorial(k) for k in range(shape)]
    return np.asarray(1 - np.exp(-x) * sum(terms))


def test_gaps_of_arrivals_have_the_distribution_that_was_asked_for() -> None:
    for shape, found in (
        (1, gaps(Arrivals.POISSON, 3.0)),
        (1, gaps(Arrivals.GAMMA, 3.0, burstiness=1)),
        (5, gaps(Arrivals.GAMMA, 3.0, burstiness=5)),
    ):
        assert passes_kolmogorov_smirnov(found, erlang_cdf(shape, 3.0, found))
        assert not passes_kolmogorov_smirnov(found, erlang_cdf(shape + 1, 3.0, found))


def test_a_think_time_is_read_as_it_is_written() -> None:
    for text, think in (("0:0.5", Uniform(0.0, 0.5)), ("lognormal:12:0.5", LogNormal(12.0, 0.5))):
        assert parse_think(text) == think
        assert str(think) == text
    for wrong in ("5", "a:b", "2:1", "0:inf", "lognormal:0:1"):
        with pytest.raises(LoadgenError, match="think time"):
            parse_think(wrong)


# The file of a trace.

LAST = TurnPlan(32, 8, None, None, tool=False)
TRACE = (
    AgentPlan(0.1, (TurnPlan(100, 10, 2.5, 3.5, tool=False), LAST)),
    AgentPlan(1 / 3, (TurnPlan(100, 20, 0.0, None, tool=True), LAST)),
)


seconds = st.floats(0, allow_nan=False, allow_infinity=False)
tokens = st.integers(1, 10**6)


@st.composite
def agents(draw: st.DrawFn) -> AgentPlan:
    earlier = st.builds(TurnPlan, tokens, tokens, seconds, st.none() | seconds, tool=st.booleans())
    last = st.builds(TurnPlan, tokens, tokens, st.none(), st.none(), tool=st.booleans())
    return AgentPlan(draw(seconds), (*draw(st.lists(earlier, max_size=4)), draw(last)))


@given(st.lists(agents(), min_size=1, max_size=5).map(tuple))
def test_reading_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, trace: Any) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert trace_sha256(trace) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_scaling_is_a_factor_on_every_time_and_on_nothing_else() -> None:
    (first, *_), *_ = (agent.turns for agent in scaled(TRACE, 0.5))
    assert first == TurnPlan(100, 10, 1.25, 1.75, tool=False)
    assert [agent.arrival_s for agent in scaled(TRACE, 0.5)] == [0.05, 1 / 6]
    assert scaled(TRACE, 1.0) == TRACE


def changed(**fields: Any) -> str:
    """A good line with some of the agent's fields replaced."""
    return json.dumps({"arrival_s": 0.0, "turns": [turn(), LAST_TURN]} | fields)


def turn(**fields: Any) -> dict[str, Any]:
    good = {"new_tokens": 8, "completion_tokens": 4, "think_s": 1.0, "announced_s": None, "tool": False}
    return good | fields


LAST_TURN = turn(think_s=None)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "the line: invalid JSON"),
        ("{}", "arrival_s: "),
        (changed(arrival_s=float("nan")), "arrival_s: "),
        (changed(rate=1.0), "rate: "),
        (changed(turns=[turn(new_tokens=0), LAST_TURN]), r"turns\.0\.new_tokens: "),
        (changed(turns=[turn(think_s=None), LAST_TURN]), r"turns\.0\.think_s: must be a number"),
        (changed(turns=[turn(), turn()]), r"turns\.1\.think_s: must be null"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_field(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{changed()}\n\n{line}\n", "latin-1")
    with pytest.raises(LoadgenError, match=rf"trace \S+trace\.jsonl, line 3: {complaint}") as refused:
        read_trace(path)
    assert "\n" not in str(refused.value)


# Texts come from Python's help or from a file; prompts have exactly the tokens that were asked for.

TOPICS = python_topics()
BOS = 10**6


def _word_tokenizer() -> Tokenizer:
    """Whole words: a real tokenizer at the coarse end of what models use."""
    tokenizer = Tokenizer(WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(TOPICS.documents, WordLevelTrainer(special_tokens=["?"], show_progress=False))
    return tokenizer


WORDS = _word_tokenizer()


async def words(text: str, special: bool) -> TokenIds:
    return ((BOS,) if special else ()) + tuple(WORDS.encode(text).ids)


async def characters(text: str, special: bool) -> TokenIds:
    return ((BOS,) if special else ()) + tuple(map(ord, text))


def cut(
    workload: Workload, corpus: Corpus = TOPICS, tokenize: Tokenize = words, repeat: int = 0
) -> tuple[tuple[TokenIds, ...], ...]:
    return asyncio.run(cut_prompts(plan_trace(workload), workload, corpus, tokenize, repeat))


@pytest.mark.parametrize("tokenize", [words, characters])
@given(
    system_tokens=st.integers(0, 60),
    own_tokens=st.integers(1, 400),
    turns=st.integers(1, 4),
    resume_tokens=st.integers(1, 90),
)
def test_lengths_are_exact(
    tokenize: Tokenize, system_tokens: int, own_tokens: int, turns: int, resume_tokens: int
) -> None:
    context = system_tokens + own_tokens
    workload = Workload(3, context=context, system_tokens=system_tokens, turns=turns, resume_tokens=resume_tokens)
    prompts = cut(workload, tokenize=tokenize)
    assert [[len(turn) for turn in agent] for agent in prompts] == 3 * [[context, *(turns - 1) * [resume_tokens]]]
    assert [[token for turn in agent for token in turn].count(BOS) for agent in prompts] == 3 * [1]


def test_agents_and_repeats_share_the_system_text_and_nothing_after_it() -> None:
    """A prefix cache must not find more in common than agents have in use, nor what a run before has left."""
    workload = Workload(30, context=80, system_tokens=20, turns=1)
    prompts = [agent[0] for repeat in range(4) for agent in cut(workload, tokenize=characters, repeat=repeat)]
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:40] for prompt in prompts}) == len(prompts) == 120
    with pytest.raises(LoadgenError, match="system_tokens"):
        cut(Workload(system_tokens=50), Corpus("short", "Hi.", ("text",)))
    assert fingerprint(cut(workload)) == fingerprint(cut(workload)) != fingerprint(cut(replace(workload, seed=2)))


async def test_fresh_prompts_share_nothing_with_one_another_nor_with_those_of_an_earlier_run() -> None:
    runs = [await fresh_prompts(20, 300, TOPICS, 3, characters) for _ in range(3)]
    prompts = [prompt for run in runs for prompt in run]
    assert {len(prompt) for prompt in prompts} == {300}
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def conversation(name: str, **said: str) -> str:
    """A line of a file: who says what."""
    messages = [{"role": role, "content": content} for role, content in said.items()]
    return json.dumps({"id": name, "messages": messages}, ensure_ascii=False)


GOOD = conversation("a", system="Be kind.", user="Hello", assistant="Hi\u2028there")
SHORT = conversation("b", system="Be brief.", user="Bye")


def write_texts(folder: Path, *lines: str) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return path


def test_a_file_gives_its_first_system_text_and_all_conversations(tmp_path: Path) -> None:
    corpus = read_texts(write_texts(tmp_path, GOOD, SHORT, ""))
    assert corpus.name == "texts.jsonl"
    assert corpus.system == "Be kind."
    first, second = corpus.documents
    assert (first, second) == ("user: Hello\n\nassistant: Hi\u2028there\n\n", "user: Bye\n\n")
    assert list(islice(corpus.read_from(1), 3)) == [second, first, second]


@pytest.mark.parametrize("line", ["{", '{"id": "c", "messages": [{"role": "user"}]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = write_texts(tmp_path, GOOD, line)
    with pytest.raises(LoadgenError, match=r"texts\.jsonl, line 2: not a conversation: \S") as refused:
        read_texts(path)
    assert "pydantic" not in str(refused.value)
    assert "\n" not in str(refused.value)

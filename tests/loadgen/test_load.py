"""A load: what its workload decides ahead, the file of its trace, and its texts."""

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

from loadgen.errors import LoadgenError
from loadgen.load.prompts import Corpus, TokenIds, Tokenize, cut_prompts, fingerprint, python_topics, read_texts
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, read_trace, write_trace
from loadgen.load.workload import Arrivals, LogNormal, Replay, Workload, arrival_times, plan_trace


def earlier_turns(trace: Trace) -> list[TurnPlan]:
    """Those that another turn follows."""
    return [turn for agent in trace for turn in agent.turns[:-1]]


BASE = Workload(40, turns=4, tool_share=0.5, eta_noise=0.2)


def test_a_replayed_trace_is_what_is_in_the_file_and_its_prompts_have_room_for_the_system_text(tmp_path: Path) -> None:
    trace = plan_trace(BASE)
    write_trace(trace, tmp_path / "trace.jsonl")
    assert plan_trace(Replay(trace=tmp_path / "trace.jsonl")) == trace
    half = plan_trace(Replay(trace=tmp_path / "trace.jsonl", time_scale=0.5))
    assert [agent.arrival_s for agent in half] == [agent.arrival_s / 2 for agent in trace]
    assert [turn.think_s for turn in earlier_turns(half)] == [(turn.think_s or 0) / 2 for turn in earlier_turns(trace)]
    short = AgentPlan(0.0, (TurnPlan(20, 1, None, None, tool=False),))
    write_trace((*trace[:3], short), tmp_path / "short.jsonl")
    with pytest.raises(LoadgenError, match="must be less than the 20 tokens with which agent 3"):
        plan_trace(Replay(trace=tmp_path / "short.jsonl", system_tokens=20))


OTHER_AGENTS: list[dict[str, Any]] = [{"turns": 9}, {"think": LogNormal(3.0, 1.0)}, {"tool_share": 0.0}]
OTHER_TIMES: list[dict[str, Any]] = [{"arrivals": Arrivals.GAMMA, "burstiness": 0.3}, {"eta_noise": 1.0}]


def test_what_decides_arrivals_does_not_decide_pauses_and_tools_nor_the_reverse() -> None:
    plain = plan_trace(BASE)
    for other in OTHER_AGENTS:
        assert [agent.arrival_s for agent in plan_trace(replace(BASE, **other))] == [each.arrival_s for each in plain]
    for other in OTHER_TIMES:
        before, after = (earlier_turns(trace) for trace in (plain, plan_trace(replace(BASE, **other))))
        assert [(turn.think_s, turn.tool) for turn in before] == [(turn.think_s, turn.tool) for turn in after]


def test_gaps_of_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for() -> None:
    """Of a gamma distribution with that shape: its mean, and its deviation over its mean."""
    for arrivals, shape in ((Arrivals.POISSON, 1.0), (Arrivals.GAMMA, 1.0), (Arrivals.GAMMA, 5.0)):
        times = arrival_times(arrivals, 4000, 3.0, shape, np.random.default_rng(7))
        gaps = np.diff(times, prepend=0.0)
        assert np.mean(gaps) == pytest.approx(1 / 3, rel=0.08)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(shape**-0.5, rel=0.08)


# The file of a trace.


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
    with pytest.raises(LoadgenError, match=r"texts\.jsonl, line 2: not a conversation: \S") as refused:
        read_texts(write_texts(tmp_path, GOOD, line))
    assert "pydantic" not in str(refused.value)
    assert "\n" not in str(refused.value)

"""Prompts have exactly the tokens that were asked for, whatever the tokenizer."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

from loadgen.errors import LoadgenError
from loadgen.load.corpus import Corpus, python_topics
from loadgen.load.prompts import TokenIds, Tokenize, cut_prompts, fingerprint
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.workload import Workload, plan_trace

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
@settings(max_examples=30)
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


def test_every_turn_has_its_own_length() -> None:
    lengths = [[40, 7, 90], [33], [35, 1, 1, 1]]
    trace = tuple(AgentPlan(0.0, tuple(TurnPlan(new, 1, None, None, False) for new in agent)) for agent in lengths)
    prompts = asyncio.run(cut_prompts(trace, Workload(system_tokens=20), TOPICS, words))
    assert [[len(turn) for turn in agent] for agent in prompts] == lengths


def test_repeats_share_the_system_text_and_nothing_after_it() -> None:
    """A run must not find its own prompts in the cache that the one before has left."""
    workload = Workload(3, context=80, system_tokens=20, turns=1)
    prompts = [agent[0] for repeat in range(30) for agent in cut(workload, tokenize=characters, repeat=repeat)]
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:40] for prompt in prompts}) == len(prompts) == 90


def test_agents_share_the_system_text_and_nothing_after_it() -> None:
    """A prefix cache must not find more in common than agents have in use."""
    workload = Workload(100, context=80, system_tokens=20, turns=1)
    prompts = [agent[0] for agent in cut(workload, tokenize=characters)]
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:40] for prompt in prompts}) == len(prompts) == 100


def test_the_turns_of_an_agent_are_one_text() -> None:
    (agent,) = cut(Workload(1, context=300, system_tokens=10, turns=4, resume_tokens=50), tokenize=characters)
    text = "".join(map(chr, (token for turn in agent for token in turn[10 if turn is agent[0] else 0 :])))
    assert text.startswith("Agent 0.0 of run 0.\n\n")
    assert any(text.removeprefix("Agent 0.0 of run 0.\n\n")[:200] in document for document in TOPICS.documents)


def test_seed_decides_the_text() -> None:
    one, other = Workload(seed=1), Workload(seed=2)
    assert cut(one) == cut(one)
    assert fingerprint(cut(one)) == fingerprint(cut(one)) != fingerprint(cut(other))


def test_a_corpus_shorter_than_a_prompt_is_read_again() -> None:
    corpus = Corpus("short", "You are short.", ("one two three ",))
    ((prompt,),) = cut(Workload(1, context=2000, system_tokens=5, turns=1), corpus, characters)
    assert len(prompt) == 2000


def test_a_system_text_that_is_too_short_is_an_error() -> None:
    with pytest.raises(LoadgenError, match="system_tokens"):
        cut(Workload(system_tokens=50), Corpus("short", "Hi.", ("text",)))


def test_a_tokenizer_without_tokens_is_an_error() -> None:
    async def mute(_text: str, _special: bool) -> TokenIds:
        return ()

    with pytest.raises(LoadgenError, match="no tokens"):
        cut(Workload(system_tokens=0), tokenize=mute)

"""Texts come from Python's help or from a file; prompts have exactly the tokens that were asked for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

from loadgen.errors import LoadgenError
from loadgen.load.corpus import Corpus, python_topics, read_texts
from loadgen.load.prompts import TokenIds, Tokenize, cut_prompts, fingerprint, fresh_prompts
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


CONVERSATIONS = [
    {
        "id": "a",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi\u2028there"},
        ],
    },
    {"id": "b", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bye"}]},
]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return path


def test_a_file_gives_its_first_system_text_and_all_conversations(tmp_path: Path) -> None:
    corpus = read_texts(write(tmp_path, *(json.dumps(each, ensure_ascii=False) for each in CONVERSATIONS), ""))
    assert corpus.name == "texts.jsonl"
    assert corpus.system == "Be kind."
    first, second = corpus.documents
    assert (first, second) == ("user: Hello\n\nassistant: Hi\u2028there\n\n", "user: Bye\n\n")
    assert list(islice(corpus.read_from(1), 3)) == [second, first, second]


@pytest.mark.parametrize("line", ["{", '{"id": "c", "messages": [{"role": "user"}]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, json.dumps(CONVERSATIONS[0]), line)
    with pytest.raises(LoadgenError, match=r"texts\.jsonl, line 2: not a conversation: \S") as refused:
        read_texts(path)
    assert "pydantic" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"\n\n", b'{"id": "c", "messages": []}', b"\xff\xfe"])
def test_a_file_without_conversations_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(LoadgenError, match=r"empty\.jsonl"):
        read_texts(path)

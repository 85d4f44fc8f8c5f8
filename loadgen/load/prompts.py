"""From real text to prompts of exactly the wanted number of tokens, also to prompts that no server has seen."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field

from loadgen.errors import LoadgenError
from loadgen.load.lines import parse_line, read_lines
from loadgen.load.trace import Trace
from loadgen.load.workload import Load, Workload, plan_trace

SYSTEM_TOPIC = "debugger"
FORM = "each line is one conversation: a JSON object with id, and messages with role and content"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text that opens every agent's prompt, and documents for the rest."""

    name: str
    system: str
    documents: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Fingerprint: runs are comparable only if it is equal."""
        return hashlib.sha256("\0".join((self.system, *self.documents)).encode()).hexdigest()

    def read_from(self, first: int) -> Iterator[str]:
        """The documents in order from number `first` on, for ever."""
        while True:
            yield self.documents[first % len(self.documents)]
            first += 1


def python_topics() -> Corpus:
    """The help topics of the running Python: some 460,000 characters of English about the language.

    They ship with Python as `pydoc_data.topics`, so a run needs no download. They differ between Python versions, which
    `sha256` shows.
    """
    documents = tuple(text for topic, text in sorted(topics.items()) if topic != SYSTEM_TOPIC)
    return Corpus("pydoc_data.topics", topics[SYSTEM_TOPIC], documents)


class _Message(BaseModel):
    role: str
    content: str


class Conversation(BaseModel):
    """A line of a file of them."""

    id: Annotated[str, Field(pattern=r"^[ -~]+$")]
    messages: list[_Message]


def read_texts(path: Path) -> Corpus:
    """Conversations from a file with one JSON object a line: `id`, and `messages` with `role` and `content`.

    The system messages of the first conversation open every prompt; the other messages of each are one document. Raises
    `LoadgenError` if the file cannot be read or has no conversation, and for a line that is not one.
    """
    lines = read_lines(path, "texts")
    conversations = [parse_line(Conversation, f"{where}: not a conversation", line, FORM) for where, line in lines]
    documents = tuple(text for conversation in conversations if (text := _render(conversation)))
    if not documents:
        raise LoadgenError(f"texts {path}: no conversation with a message in it")
    system = "\n\n".join(m.content for m in conversations[0].messages if m.role == "system")
    return Corpus(path.name, system, documents)


def _render(conversation: Conversation) -> str:
    turns = (message for message in conversation.messages if message.role != "system")
    return "".join(f"{message.role}: {message.content}\n\n" for message in turns)


TokenIds = tuple[int, ...]

Tokenize = Callable[[str, bool], Awaitable[TokenIds]]
"""A target's own tokenizer: the ids of a text, and whether to add special tokens in front."""

CHARACTERS_PER_TOKEN = 8
"""More than English takes, so that one call to the tokenizer is usually enough."""


async def cut_prompts(
    trace: Trace, load: Load, corpus: Corpus, tokenize: Tokenize, repeat: int = 0
) -> tuple[tuple[TokenIds, ...], ...]:
    """What each agent of `trace` adds to its history in each of its turns, in tokens of the target's model.

    The first prompt is the shared system text and then the agent's own; lengths are exact because they are cut as
    tokens. `repeat` counts the runs of the trace on one server: an agent's own text begins differently in each, so
    that a prefix cache finds nothing but the system text of the runs before. Raises `LoadgenError` if the corpus or the
    tokenizer does not yield enough.
    """
    system = (await tokenize(corpus.system, True))[: load.system_tokens]
    if len(system) < load.system_tokens:
        raise LoadgenError(f"the system text of {corpus.name} has only {len(system)} tokens: lower system_tokens")
    starts = np.random.default_rng(load.seed).permutation(len(corpus.documents))
    prompts = []
    for number, agent in enumerate(trace):
        documents = corpus.read_from(int(starts[number % len(starts)]))
        lengths = [turn.new_tokens for turn in agent.turns]
        opening = f"Agent {repeat}.{number} of run {load.seed}.\n\n"
        own = await _own_ids(sum(lengths) - len(system), opening, documents, tokenize, special=not system)
        prompts.append(_cut(system + own, lengths))
    return tuple(prompts)


def fingerprint(prompts: Sequence[Sequence[TokenIds]]) -> str:
    """SHA-256 of all the tokens that a target is sent as new: equal where two targets got the same."""
    return hashlib.sha256(repr([list(agent) for agent in prompts]).encode()).hexdigest()


async def _own_ids(
    wanted: int, opening: str, documents: Iterator[str], tokenize: Tokenize, *, special: bool
) -> TokenIds:
    """The `wanted` tokens that only one agent has. `opening` is its own, so that no two agents share a prefix."""
    text = opening
    ids: TokenIds = ()
    while len(ids) < wanted:
        goal = len(text) + (wanted - len(ids)) * CHARACTERS_PER_TOKEN
        while len(text) < goal:
            text += next(documents)
        ids = await tokenize(text, special)
        if not ids:
            raise LoadgenError("the tokenizer gave no tokens for a text")
    return ids[:wanted]


def _cut(ids: TokenIds, lengths: Sequence[int]) -> tuple[TokenIds, ...]:
    return tuple(ids[start:end] for start, end in pairwise(accumulate(lengths, initial=0)))


RUNS = 10**6
"""Few digits, so that prompts differ within their first block also where a token is a byte."""


async def fresh_prompts(count: int, tokens: int, corpus: Corpus, seed: int, tokenize: Tokenize) -> tuple[TokenIds, ...]:
    """`count` prompts of `tokens` tokens each; no KV of any of them can be on a server yet.

    `seed` decides the texts, all but a number in the first line of each. Raises `LoadgenError`, `client.DjinnError`.
    """
    load = Workload(count, context=tokens, turns=1, system_tokens=0, seed=seed)
    cut = await cut_prompts(plan_trace(load), load, corpus, tokenize, repeat=secrets.randbelow(RUNS))
    return tuple(turns[0] for turns in cut)

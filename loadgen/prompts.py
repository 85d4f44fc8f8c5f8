"""From text to prompts of exactly the wanted number of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from loadgen.corpus import Corpus
from loadgen.errors import LoadgenError
from loadgen.workload import Workload

TokenIds = tuple[int, ...]

Tokenize = Callable[[str, bool], Awaitable[TokenIds]]
"""A target's own tokenizer: the ids of a text, and whether to add special tokens in front."""

CHARACTERS_PER_TOKEN = 8
"""More than English takes, so that one call to the tokenizer is usually enough."""


async def cut_prompts(
    workload: Workload, corpus: Corpus, tokenize: Tokenize, agents: int
) -> tuple[tuple[TokenIds, ...], ...]:
    """What each of `agents` agents adds to its history in each of its turns, in tokens of the target's model.

    The first prompt is the shared system text and then the agent's own; lengths are exact because they are cut as
    tokens. Raises `LoadgenError` if the corpus or the tokenizer does not yield enough.
    """
    system = (await tokenize(corpus.system, True))[: workload.system_tokens]
    if len(system) < workload.system_tokens:
        raise LoadgenError(f"the system text of {corpus.name} has only {len(system)} tokens: lower system_tokens")
    starts = np.random.default_rng(workload.seed).permutation(len(corpus.documents))
    prompts = []
    for agent in range(agents):
        documents = corpus.read_from(int(starts[agent % len(starts)]))
        own = await _own_ids(workload, agent, documents, tokenize)
        prompts.append(_cut(workload, system, own))
    return tuple(prompts)


def fingerprint(prompts: Sequence[Sequence[TokenIds]]) -> str:
    """SHA-256 of all the tokens that a target is sent as new: equal where two targets got the same."""
    return hashlib.sha256(repr([list(agent) for agent in prompts]).encode()).hexdigest()


async def _own_ids(workload: Workload, agent: int, documents: Iterator[str], tokenize: Tokenize) -> TokenIds:
    """All tokens that only this agent has. They open with a line of its own, so that no two agents share a prefix."""
    wanted = workload.context - workload.system_tokens + (workload.turns - 1) * workload.resume_tokens
    text = f"Agent {agent} of run {workload.seed}.\n\n"
    ids: TokenIds = ()
    while len(ids) < wanted:
        goal = len(text) + (wanted - len(ids)) * CHARACTERS_PER_TOKEN
        while len(text) < goal:
            text += next(documents)
        ids = await tokenize(text, workload.system_tokens == 0)
        if not ids:
            raise LoadgenError("the tokenizer gave no tokens for a text")
    return ids[:wanted]


def _cut(workload: Workload, system: TokenIds, own: TokenIds) -> tuple[TokenIds, ...]:
    """The first prompt, and what each later turn adds."""
    first = workload.context - len(system)
    later = range(first, len(own), workload.resume_tokens)
    return (system + own[:first], *(own[start : start + workload.resume_tokens] for start in later))

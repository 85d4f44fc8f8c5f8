"""Prompts that no server has heard before, not even in an earlier run of the same seed."""

from __future__ import annotations

import secrets

from loadgen.corpus import Corpus
from loadgen.prompts import TokenIds, Tokenize, cut_prompts
from loadgen.workload import Workload, plan_trace

RUNS = 10**6
"""Few digits, so that prompts differ within their first block also where a token is a byte."""


async def fresh_prompts(count: int, tokens: int, corpus: Corpus, seed: int, tokenize: Tokenize) -> tuple[TokenIds, ...]:
    """`count` prompts of `tokens` tokens each; no KV of any of them can be on a server yet.

    `seed` decides the texts, all but a number in the first line of each. Raises `LoadgenError`, `client.DjinnError`.
    """
    load = Workload(count, context=tokens, turns=1, system_tokens=0, seed=seed)
    cut = await cut_prompts(plan_trace(load), load, corpus, tokenize, repeat=secrets.randbelow(RUNS))
    return tuple(turns[0] for turns in cut)

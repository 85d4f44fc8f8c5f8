"""Prompts that share nothing with one another, nor with those of an earlier run."""

from __future__ import annotations

from loadgen.load.corpus import python_topics
from loadgen.load.prompts import TokenIds, fresh_prompts

BLOCK = 16


async def by_bytes(text: str, _special: bool) -> TokenIds:
    return tuple(text.encode())


async def test_no_two_prompts_begin_with_the_same_block() -> None:
    """As bytes they differ last: every other tokenizer makes fewer tokens of the same text."""
    runs = [await fresh_prompts(20, 300, python_topics(), 3, by_bytes) for _ in range(3)]
    prompts = [prompt for run in runs for prompt in run]
    assert {len(prompt) for prompt in prompts} == {300}
    assert len({prompt[:BLOCK] for prompt in prompts}) == len(prompts)

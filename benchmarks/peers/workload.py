"""What every target is asked: prompts of exact token counts, cut from real text, with no shared prefix."""

from dataclasses import dataclass

from benchmarks.text import TokenSource

SHORT_PROMPT_TOKENS = 100
SHORT_PROMPT_SPREAD = 16
LONG_PROMPT_TOKENS = 1000
PREFIX_TOKENS = 8
WARM_UP_TOKENS = 8
LARGEST_BLOCK = 128
"""Tokens of one block of KV: vLLM's on a CPU."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much one round asks of one target.

    concurrencies: streams in flight, one phase each, in this order.
    max_tokens: tokens generated a stream; the end-of-sequence token is ignored.
    long_prompts: requests with `LONG_PROMPT_TOKENS` prompt tokens and one generated token, one after the other.
    """

    concurrencies: tuple[int, ...] = (1, 8, 32)
    max_tokens: int = 64
    long_prompts: int = 5

    @property
    def context_tokens(self) -> int:
        """As long as any conversation may become, in whole blocks of every server."""
        return -(-(LONG_PROMPT_TOKENS + self.max_tokens) // LARGEST_BLOCK) * LARGEST_BLOCK


FULL = Plan()
QUICK = Plan(max_tokens=16, long_prompts=2)


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of one round as token ids; `warm_up` prompts appear nowhere else.

    decode: one batch of prompts for every concurrency of the plan, in its order.
    """

    max_tokens: int
    warm_up: list[list[int]]
    warm_up_long: list[int]
    decode: list[list[list[int]]]
    long: list[list[int]]


def build_workload(plan: Plan, tokens: list[int]) -> Workload:
    """Deals disjoint slices of `tokens` to the phases of one round.

    Raises ValueError if the text is too short or two prompts begin with the same `PREFIX_TOKENS` tokens.
    """
    take = TokenSource(tokens).take

    def short_prompts(count: int) -> list[list[int]]:
        return [take(short_prompt_tokens(index)) for index in range(count)]

    workload = Workload(
        max_tokens=plan.max_tokens,
        warm_up=short_prompts(max(plan.concurrencies)),
        warm_up_long=take(LONG_PROMPT_TOKENS),
        decode=[short_prompts(streams) for streams in plan.concurrencies],
        long=[take(LONG_PROMPT_TOKENS) for _ in range(plan.long_prompts)],
    )
    _check_prefixes(workload)
    return workload


def short_prompt_tokens(index: int) -> int:
    """Length of a short prompt: 84 to 116 tokens, 100 on average, so that batches are ragged as in real use."""
    return SHORT_PROMPT_TOKENS + (index * 7 + SHORT_PROMPT_SPREAD) % (2 * SHORT_PROMPT_SPREAD + 1) - SHORT_PROMPT_SPREAD


def _check_prefixes(workload: Workload) -> None:
    prompts = [*workload.warm_up, workload.warm_up_long, *workload.long]
    prompts += [prompt for batch in workload.decode for prompt in batch]
    prefixes = {tuple(prompt[:PREFIX_TOKENS]) for prompt in prompts}
    if len(prefixes) != len(prompts):
        raise ValueError(f"two prompts share their first {PREFIX_TOKENS} tokens")

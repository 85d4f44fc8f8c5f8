"""Attacks by turns: many, long, costly to choose tokens of, or never to be read."""

from benchmarks.fairness.attacks.base import Attack, Target, again_and_again

LONG_PROMPT = 1000
MOST_STOPS, STOP_CHARACTERS, MOST_STOP_IDS, MOST_BIASES = 16, 1000, 64, 1024


async def long_prompts(target: Target) -> None:
    prompt = min(LONG_PROMPT, target.model.context - 8)
    await again_and_again(target, 16, lambda: target.alone(prompt, 1))


async def log_probabilities(target: Target) -> None:
    answer = min(800, target.model.context // 2)
    await again_and_again(target, 8, lambda: target.alone(16, answer, logprobs=20))


async def stop_lists(target: Target) -> None:
    stops = ["x" * (STOP_CHARACTERS - 2) + f"{number:02}" for number in range(MOST_STOPS)]
    ids = list(range(MOST_STOP_IDS))
    await again_and_again(target, 8, lambda: target.alone(16, 200, stop=stops, stop_token_ids=ids))


async def penalties(target: Target) -> None:
    biases = {str(token_id): 0.5 for token_id in range(20, 20 + min(MOST_BIASES, target.model.vocabulary - 20))}
    rules = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": biases}
    sampled = {**rules, "temperature": 1.0, "top_p": 0.9, "top_k": 100, "min_p": 0.01}
    await again_and_again(target, 16, lambda: target.alone(64, 200, **sampled))


async def cancel_storm(target: Target) -> None:
    async def begin_and_leave() -> None:
        body = {"model": target.model.name, "prompt": target.token_ids(200), "max_tokens": 200, "stream": True}
        async with target.client.stream("POST", "/v1/completions", json=body) as answer:
            target.answers[str(answer.status_code)] += 1
            async for _ in answer.aiter_bytes():
                return

    await again_and_again(target, 16, begin_and_leave)


ATTACKS = (
    Attack("long-prompts", "16 at once ask for one token after 1,000 new ones", long_prompts),
    Attack("logprobs", "8 at once ask for 20 alternatives of each of 800 tokens", log_probabilities),
    Attack("stop-lists", "8 at once have 16 stop strings of 1,000 characters and 64 stop tokens", stop_lists),
    Attack("penalties", "16 at once have every penalty, 1,024 biases, top-p, top-k and min-p", penalties),
    Attack("cancel-storm", "16 at once begin a stream and leave at its first byte", cancel_storm),
)

"""vLLM's tokens a second of batches: `python decode_rates.py MODEL PROMPT TOKENS ROUNDS BATCH...`, with vLLM alone.

Compiled, with CUDA graphs and prefix caching, as it is by default. Writes a line `[batch, rates]` of JSON for each
batch. The rate is of the tokens after the first one: a call for one token is taken off.
"""

import json
import sys
import time

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]


def main() -> None:
    """Measure each batch; the first round prepares."""
    model, (prompt, tokens, rounds, *batches) = sys.argv[1], map(int, sys.argv[2:])
    llm = LLM(
        model, load_format="dummy", max_model_len=prompt + tokens + 16, max_num_seqs=max(batches),
        gpu_memory_utilization=0.5,
    )  # fmt: skip

    def seconds(batch: int, tokens: int, seed: int) -> float:
        prompts = [{"prompt_token_ids": [(seed + 7 * row + at) % 256 for at in range(prompt)]} for row in range(batch)]
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0), use_tqdm=False)
        return time.perf_counter() - began

    for batch in batches:
        rates = []
        for _ in range(rounds + 1):  # the prompts of both calls are in the prefix cache from the first round on
            first, whole = seconds(batch, 1, batch), seconds(batch, tokens, batch)
            rates.append(batch * (tokens - 1) / (whole - first))
        print(json.dumps([batch, rates[1:]]), flush=True)


if __name__ == "__main__":
    main()

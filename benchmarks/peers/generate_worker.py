"""The Transformers baseline: `generate` over left-padded batches. Reads a workload as JSON from standard input, writes
a measurement as JSON to standard output: `python -m benchmarks.peers.generate_worker MODEL DTYPE`.
"""

import os
import sys
import time
from typing import Any

import orjson
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.cpu_meter import CpuMeter
from benchmarks.peers.rounds import Measurement
from benchmarks.peers.timeline import Stream, measure_decode
from benchmarks.peers.workload import WARM_UP_TOKENS, Workload
from loadgen.rivals.step_times import StepTimes

PAD_ID = 0


def measure(model_path: str, dtype: str, workload: Workload) -> Measurement:
    """Loads the model, warms up, and runs the workload."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    for prompts in workload.decode:
        _generate(model, workload.warm_up[: len(prompts)], WARM_UP_TOKENS)
    _generate(model, [workload.warm_up_long], 1)
    meter = CpuMeter(sorted(os.sched_getaffinity(0)), time.process_time)
    return Measurement(
        decode=[measure_decode(_generate(model, prompts, workload.max_tokens)) for prompts in workload.decode],
        ttft_s=[_generate(model, [prompt], 1)[0].first_token_s for prompt in workload.long],
        client_cpu_share=0.0,
        other_cpu_share=meter.other_share(),
    )


def _generate(model: Any, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
    """Greedy tokens for all prompts in one batch. Every stream gets its token at the end of the step."""
    times = StepTimes()
    submitted = time.perf_counter()
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=PAD_ID,
            streamer=times,
        )
    return [Stream(submitted, times.seconds, len(times.seconds)) for _ in prompts]


if __name__ == "__main__":
    result = measure(sys.argv[1], sys.argv[2], Workload(**orjson.loads(sys.stdin.buffer.read())))
    sys.stdout.buffer.write(orjson.dumps(result))

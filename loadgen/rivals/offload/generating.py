"""What the programs have in common: `generate`, timed token by token, and the lines that ask for it."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from loadgen.rivals.step_times import StepTimes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAD_ID = 0


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], tokens: int, device: torch.device = DEVICE) -> dict[str, Any]:
    """Exactly so many tokens after each prompt, and the seconds until each of them was there."""
    ids = torch.tensor(prompts, device=device)
    times, began = StepTimes(), time.perf_counter()
    model.generation_config.eos_token_id = None
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=PAD_ID,
        streamer=times,
    )
    seconds = [at - began for at in times.seconds]
    return {"seconds": seconds, "token_ids": found[:, ids.shape[1] :].tolist()}


def answer_lines(load: Callable[[dict[str, Any]], Any], offload: str) -> None:
    """Load a model as the first line asks, tell what it runs on and where to it is offloaded, and generate.

    Libraries print to stdout, and so do the compilers that they start: what they say goes to stderr.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model = load(json.loads(sys.stdin.readline()))
    about = {"device": DEVICE.type, "threads": torch.get_num_threads(), "offload": offload}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(generate(model, asked["prompts"], asked["tokens"])), file=answers, flush=True)

"""One Transformers model, and `generate` over a left-padded batch of jobs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from loadgen.rivals.baseline.requests import Job

OnToken = Callable[[int, int], None]
"""Told the number of a job within its batch, and its next token."""

PAD_ID = 0


class CausalModel:
    """A model in evaluation mode on `threads` cores."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = frozenset([eos] if isinstance(eos, int) else eos or [])
        self._model.generation_config.eos_token_id = None  # jobs end one by one: see `_Hand`

    @property
    def context(self) -> int:
        """How many tokens a job may have, those that it generates included."""
        length: int = self._model.config.max_position_embeddings
        return length

    def generate(self, jobs: Sequence[Job], on_token: OnToken) -> None:
        """Greedy tokens for all jobs in one batch, which ends with the last of them."""
        width = max(len(job.prompt) for job in jobs)
        padding = [width - len(job.prompt) for job in jobs]
        ids = [[PAD_ID] * pad + list(job.prompt) for pad, job in zip(padding, jobs, strict=True)]
        mask = [[0] * pad + [1] * len(job.prompt) for pad, job in zip(padding, jobs, strict=True)]
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                pad_token_id=PAD_ID,
                streamer=_Hand(jobs, self._eos, on_token),
            )


class _Hand:
    """A streamer for `generate`: hands out the tokens of each step until each job has all of its own."""

    def __init__(self, jobs: Sequence[Job], eos: frozenset[int], on_token: OnToken) -> None:
        self._jobs = jobs
        self._eos = eos
        self._on_token = on_token
        self._left = [job.max_tokens for job in jobs]
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Told the prompt first, then one token for every job of the batch, `[jobs]` int64."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for index, token in enumerate(value.tolist()):
            if self._left[index] > 0:
                self._on_token(index, token)
                ended = token in self._eos and not self._jobs[index].ignore_eos
                self._left[index] = 0 if ended else self._left[index] - 1

    def end(self) -> None:
        """Nothing is held back."""

"""Djinn and vLLM on the same GPU: tokens a second of batches, then eighty agents, one server after the other."""

import gc
import tempfile
from pathlib import Path
from statistics import mean

import torch

from benchmarks.engine.loading import load
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.rivals.vllm import environment, rates_of_vllm, vllm_launch, write_model
from benchmarks.gpu_check.stages import density
from benchmarks.gpu_check.stages.decode import AHEAD, CHART, djinn_rates
from loadgen.report.figures import Spread

AGENTS_S = 110.0
"""With less time than that the agents are not begun."""


def run(context: StageContext) -> None:
    """Batches, then agents."""
    environment()
    with tempfile.TemporaryDirectory() as folder:
        _decode(context, Path(folder, "decode"))
        if context.left_s < AGENTS_S:
            context.journal.note("There was no time for the agents.")
            return
        plan = context.plan.beside_vllm
        model = Path(folder, "agents")
        write_model(plan.agents.model, model)
        density.run_beside(
            context, plan.agents, lambda port: vllm_launch(plan.agents, model, plan.kv_tokens, plan.offload_gib, port)
        )


def _decode(context: StageContext, model: Path) -> None:
    plan, journal = context.plan.beside_vllm.decode, context.journal
    room = f"{max(plan.batches) + 1}x{plan.prompt_tokens + plan.tokens + 16}"
    with load(context, plan.model, max_running=max(plan.batches), kv_device=room, kv_policy="none") as live:
        own = {batch: djinn_rates(live, plan, batch) for batch in plan.batches}
    del live
    gc.collect()
    torch.cuda.empty_cache()
    for batch, rates in own.items():
        journal.point(CHART, "Djinn", batch, mean(rates))
        journal.figure(f"Djinn, batch {batch}", "tok/s", Spread.over(rates))
    write_model(plan.model, model)
    for batch, rates in rates_of_vllm(context, plan, model):
        journal.samples(f"vLLM, batch {batch}, tok/s", rates)
        journal.point(CHART, "vLLM", batch, mean(rates))
        journal.figure(f"vLLM, batch {batch}", "tok/s", Spread.over(rates))
        journal.value(f"Djinn / vLLM, batch {batch}", "×", mean(own[batch]) / mean(rates), AHEAD)

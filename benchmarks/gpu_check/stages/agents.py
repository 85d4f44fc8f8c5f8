"""Eighty agents over HTTP on a device that holds twenty: the load generator's `density`, at a multiple of the speed.
Then Djinn and vLLM on the same GPU, vLLM as `make gpu-rivals` has packed it: batches, and the same agents.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from app.model_store.resolve import load_tokenizer
from benchmarks.engine.loading import find_model, load, transformers_config
from benchmarks.gpu_check.journal import SkipStage, StageContext
from benchmarks.gpu_check.plan import DecodePlan, DensityPlan
from benchmarks.gpu_check.stages.decode import AHEAD, CHART, djinn_rates
from loadgen.errors import NotAsMeant
from loadgen.experiments.density.experiment import report_of, run_density
from loadgen.experiments.density.running import Plan
from loadgen.load.prompts import python_topics
from loadgen.load.workload import Measurement, Uniform, Workload, plan_trace
from loadgen.peers.djinn import djinn_launch
from loadgen.peers.vllm import CUDA_BLOCK_TOKENS, TELL_CACHED
from loadgen.processes.launch import ROOT, Launch, flatten, without_folders
from loadgen.processes.process import free_port, running_server
from loadgen.report.report import result_path, write_report
from loadgen.report.tables import Spread, Target
from loadgen.stats import Distribution, Summary
from loadgen.targets import TargetSpec
from loadgen.targets.base import RunningTarget

FOLDER = "DJINN_RIVALS"
"""The variable that says where `benchmarks/gpu_rivals/unpacking.py` has put vLLM."""
SERVED = "rival"
DECODE_RATES = Path(__file__).resolve().parents[2] / "gpu_rivals" / "decode_rates.py"


def environment() -> dict[str, str]:
    """What vLLM's processes need. Raises `SkipStage` where there is no vLLM."""
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder, "vllm").is_dir():
        raise SkipStage(f"no vLLM: unpack what `make gpu-rivals` packs, and set {FOLDER} to its folder")
    return {"PYTHONPATH": folder, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def write_model(name: str, folder: Path) -> None:
    """A Transformers folder of `random:SHAPE` without weights, in the type of a GPU: vLLM draws its own."""
    model = find_model(name)
    config = transformers_config(model)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    tokenizer = load_tokenizer(model)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **tokenizer.special_tokens).save_pretrained(folder)


def rates_of_vllm(context: StageContext, plan: DecodePlan, model: Path) -> Iterator[tuple[int, list[float]]]:
    """Tokens a second of every batch, as far as there is time; each as soon as it is known."""
    numbers = (plan.prompt_tokens, plan.tokens, plan.rounds, *plan.batches)
    command = [sys.executable, str(DECODE_RATES), str(model), *map(str, numbers)]
    variables = {**os.environ, **environment()}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                batch, rates = json.loads(line)
                yield batch, rates
            if context.left_s <= 0:
                process.kill()


def vllm_launch(plan: DensityPlan, model: Path, kv_tokens: int, offload_gib: int, port: int) -> Launch:
    """Its server with room for `kv_tokens` on the device, the rest of its KV in host memory; else its defaults."""
    flags = {
        "--model": str(model),
        "--served-model-name": SERVED,
        "--load-format": "dummy",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(2 * plan.context),
        "--num-gpu-blocks-override": str(kv_tokens // CUDA_BLOCK_TOKENS),
        "--kv-offloading-size": str(offload_gib),
        "--gpu-memory-utilization": "0.5",
    }
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flatten(flags), TELL_CACHED]
    return Launch(server, environment())


NONE, ALL = Target(0.0), Target(1.0, at_least=True)
TURN_TIMEOUT_S = 60.0


def stage_density(context: StageContext) -> None:
    """One run of the trace on a server of its own."""
    run_beside(context, context.plan.density, None)


def run_beside(context: StageContext, plan: DensityPlan, rival: Callable[[int], Launch] | None) -> None:
    """The same, then one on the `rival`'s server on a port that it is given, if there is one."""
    load = _workload(plan)
    measured = Plan(load, plan_trace(load), python_topics(), Measurement(turn_timeout_s=TURN_TIMEOUT_S))
    port = free_port()
    launches: dict[str, tuple[Launch, int, str | None]] = {}
    launches["djinn"] = djinn_launch(_flags(context.device, plan, port)), port, None
    if rival is not None:
        port = free_port()
        launches["vllm"] = (rival(port), port, SERVED)
    with ExitStack() as servers:
        targets = []
        for name, (launch, port, model) in launches.items():
            url, command = f"http://127.0.0.1:{port}", without_folders(launch, [ROOT]).as_words()
            pid = servers.enter_context(running_server(launch.command, launch.environment, url))
            targets.append(RunningTarget(TargetSpec(name, url, model=model, pid=pid, command=command)))
            context.journal.fact(f"server of the agents, {name}", " ".join(command))
        found = asyncio.run(run_density(targets, measured, Console(file=sys.stderr)))
    context.journal.note(
        f"The agents' arrivals and think times are {plan.time_scale:g} of those of real time ({plan.rate:g} a second, "
        f"{plan.think[0]:g} to {plan.think[1]:g} s): the load is {1 / plan.time_scale:.1f} times as dense."
    )
    report = report_of(measured, found, "Agents over HTTP")
    write_report(report, result_path(context.output, report.experiment, datetime.now(UTC), "json"))
    for target, told in zip(targets, found, strict=True):
        _report(context, told.summary(measured), "" if rival is None else f", {target.name}")


def _workload(plan: DensityPlan) -> Workload:
    return Workload(
        agents=plan.agents,
        rate=plan.rate,
        system_tokens=plan.system_tokens,
        context=plan.context,
        turns=plan.turns,
        resume_tokens=plan.resume_tokens,
        completion_tokens=plan.completion_tokens,
        think=Uniform(*plan.think),
        time_scale=plan.time_scale,
        seed=plan.seed,
    )


def _flags(device: str, plan: DensityPlan, port: int) -> dict[str, str]:
    return {
        "--model": plan.model,
        "--device": device,
        "--port": str(port),
        "--kv-device": plan.kv_device,
        "--kv-host": plan.kv_host,
        "--state-dir": "none",
    }


def _report(context: StageContext, found: Summary, of: str) -> None:
    """The figures of one server; `of` says whose they are, if there are others."""
    journal = context.journal
    if not found.turns_completed:
        raise NotAsMeant(f"no turn completed: {found.turn_errors | found.other_errors}")
    journal.value(f"Turns that completed / planned{of}", "×", found.turns_completed / found.turns_planned, ALL)
    journal.value(f"Errors{of}", "", sum(found.turn_errors.values()) + sum(found.other_errors.values()), NONE)
    journal.value(f"Most agents at once{of}", "", found.peak_agents)
    journal.value(f"Tokens generated{of}", "tok/s", found.tokens_per_s)
    for label, times in _times(found).items():
        if times is not None:
            journal.value(f"{label}{of}, p50", "ms", times.p50 * 1e3)
            journal.value(f"{label}{of}, p99", "ms", times.p99 * 1e3)
    if found.recomputed_tokens is not None:
        journal.value(f"Tokens recomputed{of}", "", found.recomputed_tokens)


def _times(found: Summary) -> dict[str, Distribution | None]:
    return {
        "First token of a first turn": found.ttft_first_s,
        "First token of a resumed turn": found.ttft_resumed_s,
        "Wake-up of a resumed turn, in the server": found.wake_up_s,
        "From token to token": found.inter_token_s,
    }


AGENTS_S = 110.0
"""With less time than that the agents are not begun."""


def stage_vllm(context: StageContext) -> None:
    """Batches, then agents."""
    environment()
    with tempfile.TemporaryDirectory() as folder:
        _decode_beside(context, Path(folder, "decode"))
        if context.left_s < AGENTS_S:
            context.journal.note("There was no time for the agents.")
            return
        plan = context.plan.beside_vllm
        model = Path(folder, "agents")
        write_model(plan.agents.model, model)
        run_beside(
            context, plan.agents, lambda port: vllm_launch(plan.agents, model, plan.kv_tokens, plan.offload_gib, port)
        )


def _decode_beside(context: StageContext, model: Path) -> None:
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

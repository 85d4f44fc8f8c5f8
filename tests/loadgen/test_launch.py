"""Processes under test: how they were started, as it is published, and what samples show."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loadgen.load.records import ServerTotals
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.launch import Launch, without_folders
from loadgen.sampling import Sampler, sampling
from loadgen.sampling.readers import read_metrics
from loadgen.sampling.sampler import INTERVAL_S, process_use
from loadgen.targets import TargetSpec
from tests.loadgen.stubs import serving

FOLDERS = [Path("/home/me/djinn"), Path("/home/me/.cache/djinn/peers"), Path("/models")]


def test_a_published_launch_tells_nothing_about_the_machine() -> None:
    command = ["/home/me/djinn/.venv/bin/python", "-m", "app", "serve", "--model", "/models/smollm2", "--port", "0"]
    preloaded = "/home/me/.cache/djinn/peers/vllm/lib/libiomp5.so"
    environment = {"LD_PRELOAD": preloaded, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "/home/me/djinn"}
    published = without_folders(Launch(command, environment), FOLDERS)
    assert published.command == [".venv/bin/python", "-m", "app", "serve", "--model", "smollm2", "--port", "0"]
    assert published.environment == {"LD_PRELOAD": "vllm/lib/libiomp5.so", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."}
    ours = without_folders(djinn_launch({"--model": "/models/smollm2"}), FOLDERS).command
    assert ours == [f".venv/bin/{Path(sys.executable).name}", "-P", "-m", "app", "serve", "--model", "smollm2"]


# Samples of servers and of processes.

LLAMACPP = """\
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 2
"""
"""As its server writes it (server-context.cpp)."""


def vllm_metrics(preemptions: int = 5) -> str:
    """The metrics of two engines as Prometheus' client writes them, which vLLM uses, among other metrics."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    running = Gauge("vllm:num_requests_running", "", labels, registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "", labels, registry=registry)
    by_reason = Gauge("vllm:num_requests_waiting_by_reason", "", [*labels, "reason"], registry=registry)
    used = Gauge("vllm:kv_cache_usage_perc", "", labels, registry=registry)
    preempted = Counter("vllm:num_preemptions", "", labels, registry=registry)
    Histogram("vllm:time_to_first_token_seconds", "", labels, registry=registry).labels("m", "0").observe(1.0)
    for engine, share in (("0", 0.25), ("1", 0.75)):
        running.labels("m", engine).set(4)
        waiting.labels("m", engine).set(1)
        by_reason.labels("m", engine, "capacity").set(100)
        used.labels("m", engine).set(share)
    preempted.labels("m", "0").inc(preemptions)
    preempted.labels("m", "1").inc(1)
    return generate_latest(registry).decode()


def test_the_engines_of_a_server_are_added_up_and_the_fullest_counts() -> None:
    found = read_metrics(vllm_metrics())
    assert (found.running, found.waiting, found.kv_used) == (8, 2, 0.75)
    assert found.totals == ServerTotals(counts={"preemptions": 6})


def test_llama_cpp_has_names_of_its_own() -> None:
    found = read_metrics(LLAMACPP)
    assert (found.running, found.waiting, found.kv_used, found.totals) == (3, 2, None, ServerTotals())


async def sampled(spec: TargetSpec, seconds: float) -> Sampler:
    async with sampling(spec) as sampler:
        await asyncio.sleep(seconds)
    return sampler


@contextmanager
def metrics_of(*answers: Response) -> Iterator[TargetSpec]:
    """A server that gives these answers at `/metrics`, and the last of them from then on."""
    left = list(answers)

    async def metrics(_request: Request) -> Response:
        return left.pop(0) if len(left) > 1 else left[0]

    with serving(Starlette(routes=[Route("/metrics", metrics)])) as url:
        yield TargetSpec("stub", url, "m")


async def test_samples_come_twice_a_second_on_a_clock_that_does_not_drift() -> None:
    for _ in range(20):  # on a busy machine some come late
        with metrics_of(PlainTextResponse(vllm_metrics(5)), PlainTextResponse(vllm_metrics(8))) as spec:
            found = await sampled(spec, 2.25 * INTERVAL_S)
        first, *ticks, last = [one.at_s for one in found.samples]
        if is_on_time := ticks == pytest.approx([INTERVAL_S, 2 * INTERVAL_S], abs=0.2):
            break
    assert is_on_time, ticks
    assert first == 0.0
    assert all(at_s >= tick for at_s, tick in zip(ticks, (INTERVAL_S, 2 * INTERVAL_S), strict=True))
    assert last >= 2.25 * INTERVAL_S
    assert {(one.running, one.waiting) for one in found.samples} == {(8, 2)}
    assert found.totals == ServerTotals(counts={"preemptions": 3}), "only what was counted in between"


async def test_a_server_without_metrics_has_none_and_is_asked_once() -> None:
    with metrics_of(PlainTextResponse("no", 404), PlainTextResponse(LLAMACPP)) as spec:
        found = await sampled(spec, 1.2 * INTERVAL_S)
    told = [(one.sessions, one.bytes, one.running, one.waiting, one.kv_used) for one in found.samples]
    assert told == max(2, len(told)) * [({}, {}, None, None, None)]
    assert found.totals is None


BURN = "import time; end = time.process_time() + {s}\nwhile time.process_time() < end: pass\n"


def test_children_count_while_they_live_and_after_they_have_ended() -> None:
    """A parent that has waited for a child that computed for 0.2 s, beside one that computes for 0.3 s and lives on."""
    living = BURN.format(s=0.3) + "print(flush=True); time.sleep(60)"
    script = (
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-c', {BURN.format(s=0.2)!r}])\n"
        f"subprocess.Popen([sys.executable, '-c', {living!r}])\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            parent.stdout.readline()
            use = process_use(parent.pid)
        finally:
            os.killpg(parent.pid, 9)
    assert use is not None
    assert 0.48 <= use.cpu_s < 2.0  # Linux counts in 10 ms, and rounds each process down
    assert use.rss_bytes > 2 * 5e6  # two Pythons
    assert process_use(parent.pid) is None

"""One target at a time: start it, put the load on it, stop it."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

import httpx
import orjson

from benchmarks.cpu_meter import CpuMeter, session_cpu_s
from benchmarks.peers.load import REQUEST_TIMEOUT_S, OpenAILoad
from benchmarks.peers.peers import TRANSFORMERS, launch
from benchmarks.peers.rounds import Measurement, Round
from benchmarks.peers.timeline import DecodePhase
from benchmarks.peers.workload import Plan, Workload
from loadgen.peers.base import SERVED_NAME, ServerSettings
from loadgen.processes.launch import Launch
from loadgen.processes.process import free_port, running_server

NO_REUSE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection for each request: a server may close one that waits at the very moment when it is used again."""


class PeerRunner:
    """Measures one (peer, data type) after the other on `cores`, which this process must be bound to."""

    def __init__(self, model: Path, cores: list[int], plan: Plan) -> None:
        self._model = model
        self._cores = cores
        self._context_tokens = plan.context_tokens
        self._kv_tokens = max(plan.concurrencies) * plan.context_tokens

    def launch(self, peer: str, dtype: str, port: int) -> Launch:
        """How the peer is started."""
        settings = ServerSettings(self._model, dtype, self._kv_tokens, self._context_tokens, cores=tuple(self._cores))
        return launch(peer, settings, port)

    def run(self, number: int, peer: str, dtype: str, workload: Workload) -> Round:
        """Raises ServerFailedError or subprocess.CalledProcessError if the peer fails."""
        port = free_port()
        started = self.launch(peer, dtype, port)
        if peer == TRANSFORMERS:
            return Round(number, peer, dtype, None, _run_worker(started, workload))
        start = time.perf_counter()
        base_url = f"http://127.0.0.1:{port}"
        with running_server(started.command, started.environment, base_url) as session:
            start_s = time.perf_counter() - start
            measurement = asyncio.run(self._load(base_url, session, workload))
        return Round(number, peer, dtype, start_s, measurement)

    async def _load(self, base_url: str, session: int, workload: Workload) -> Measurement:
        async with httpx.AsyncClient(base_url=base_url, timeout=REQUEST_TIMEOUT_S, limits=NO_REUSE) as http:
            load = OpenAILoad(http, SERVED_NAME)
            await load.warm_up(workload)
            meter = CpuMeter(self._cores, lambda: time.process_time() + session_cpu_s(session))
            wall, client = time.perf_counter(), time.process_time()
            decode = await load.decode(workload)
            ttft_s = await load.first_tokens_s(workload)
            client_share = (time.process_time() - client) / (time.perf_counter() - wall) / len(self._cores)
            return Measurement(decode, ttft_s, client_share, meter.other_share())


def _run_worker(launch: Launch, workload: Workload) -> Measurement:
    result = subprocess.run(
        launch.command,
        input=orjson.dumps(workload),
        env={**os.environ, **launch.environment},
        stdout=subprocess.PIPE,
        check=True,
    )
    fields = orjson.loads(result.stdout)
    return Measurement(**{**fields, "decode": [DecodePhase(**phase) for phase in fields["decode"]]})

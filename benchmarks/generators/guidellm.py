"""GuideLLM: its scenario file, its process, its report."""

from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from benchmarks.generators.environment import GUIDELLM
from benchmarks.generators.generator import Endpoint, run_generator, scratch_folder
from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured
from loadgen.processes.environment import Environment

ROUTE = "/v1/completions"
LOST_AFTER_S = 1.0
"""When the row that is lost is due, after the one before: late enough to disturb no other."""
BODY = {"temperature": 0}
"""Added to every request: greedy."""


class GuideLLM:
    """Replays the load's arrivals; its prompts are made up of random words."""

    name = "GuideLLM"

    def __init__(self, environment: Environment) -> None:
        self._program = environment.folder / "bin" / GUIDELLM

    def run(self, endpoint: Endpoint, load: Load, seed: int) -> Measured:
        with scratch_folder() as folder:
            report = folder / "report.json"
            arrivals = folder / "arrivals.jsonl"
            arrivals.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in _rows(load, seed)))
            file = folder / "scenario.json"
            file.write_bytes(orjson.dumps(_scenario(endpoint, seed, arrivals, report)))
            command = [str(self._program), "run", "--config", str(file), "--disable-console"]
            run_generator(command, _variables(folder), folder)
            return read_report(report.read_bytes())


def _rows(load: Load, seed: int) -> list[dict[str, float]]:
    """The load's requests, and one to lose: in replay GuideLLM 0.8 mostly ends without the last row's answer.

    A run in which it does not is of another load, and is discarded.
    """
    lengths = {"input_length": load.prompt_tokens, "output_length": load.completion_tokens}
    times = [agent.arrival_s for agent in load.trace(seed)]
    return [{"timestamp": time, **lengths} for time in (*times, times[-1] + LOST_AFTER_S)]


def _scenario(endpoint: Endpoint, seed: int, arrivals: Path, report: Path) -> dict[str, Any]:
    source = {"kind": "json_file", "path": str(arrivals)}
    return {
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": endpoint.url,
                "model": endpoint.model,
                "request_format": ROUTE,
                "extras": {"body": BODY},
            },
            "profile": {"kind": "replay", "schedule_turn": "timestamp"},
            "tokenizer": {"kind": "huggingface_auto", "model": str(endpoint.tokenizer)},
            "data": [{"kind": "trace_synthetic", "source": source}],
            "seed": {"kind": "static", "value": seed},
            "outputs": [{"kind": "json", "path": str(report)}],
        }
    }


def _variables(folder: Path) -> dict[str, str]:
    """One worker process instead of ten: they share the server's cores. Nothing is fetched, nothing is kept."""
    return {
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class _Figure(BaseModel):
    mean: float
    median: float
    total_sum: float


class _Figures(BaseModel):
    successful: _Figure


class _Delay(BaseModel):
    max: float


class _Totals(BaseModel):
    successful: int


class _Metrics(BaseModel):
    request_totals: _Totals
    time_to_first_token_ms: _Figures
    output_tokens_per_second: _Figures
    prompt_token_count: _Figures
    output_token_count: _Figures
    root_dispatch_delay: _Delay | None


class _Request(BaseModel):
    cached_tokens: int | None = None


class _Requests(BaseModel):
    successful: list[_Request]


class _Benchmark(BaseModel):
    metrics: _Metrics
    requests: _Requests


class _Report(BaseModel):
    benchmarks: list[_Benchmark]


def read_report(text: bytes) -> Measured:
    """Its window begins when the first request is sent and ends with the last answer.

    Raises pydantic.ValidationError for another version's report.
    """
    [benchmark] = _Report.model_validate_json(text).benchmarks
    metrics = benchmark.metrics
    return Measured(
        requests=metrics.request_totals.successful,
        prompt_tokens=round(metrics.prompt_token_count.successful.total_sum),
        completion_tokens=round(metrics.output_token_count.successful.total_sum),
        cached_tokens=sum(request.cached_tokens or 0 for request in benchmark.requests.successful),
        ttft_p50_s=metrics.time_to_first_token_ms.successful.median / 1000,
        ttft_mean_s=metrics.time_to_first_token_ms.successful.mean / 1000,
        tokens_per_s=metrics.output_tokens_per_second.successful.mean,
        latest_s=0.0 if metrics.root_dispatch_delay is None else metrics.root_dispatch_delay.max,
    )

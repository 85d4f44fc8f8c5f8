"""The load generator under test: `python -m loadgen density`."""

import sys

from benchmarks.generators.generator import Endpoint, run_generator, scratch_folder
from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured
from loadgen.experiments.density.report import DensityReport
from loadgen.load.trace import write_trace
from loadgen.processes.process import ServerFailedError
from loadgen.results.files import read_result
from loadgen.stats import Summary


class OwnGenerator:
    """Replays the load's trace with texts of its own."""

    name = "loadgen"

    def run(self, endpoint: Endpoint, load: Load, seed: int) -> Measured:
        with scratch_folder() as folder:
            write_trace(load.trace(seed), folder / "trace.jsonl")
            target = f"djinn={endpoint.url}#{endpoint.model}"
            options = ["--target", target, "--trace", "trace.jsonl", "--seed", str(seed), "--output", "."]
            alone = ["--system-tokens", "0", "--signals", "none"]
            run_generator([sys.executable, "-m", "loadgen", "density", *options, *alone], {}, folder)
            [file] = folder.glob("density-*.json")
            report = read_result(file, DensityReport)
        return read_summary(report.targets[0].summary)


def read_summary(summary: Summary) -> Measured:
    """Its window begins with the run, when the first agent arrives, and ends with the last turn."""
    if summary.ttft_first_s is None or summary.lateness_s is None:
        raise ServerFailedError("loadgen completed no turn")
    return Measured(
        requests=summary.turns_completed,
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        cached_tokens=summary.cached_tokens or 0,
        ttft_p50_s=summary.ttft_first_s.p50,
        ttft_mean_s=summary.ttft_first_s.mean,
        tokens_per_s=summary.tokens_per_s,
        latest_s=summary.lateness_s.max,
    )

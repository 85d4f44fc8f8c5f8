"""What the open page costs agents: `python -m benchmarks.page`, 50 minutes.

Eighty agents run on a device for twenty, with the page open in Chromium and without, in pairs whose order changes. The
browser only gets processor time that nobody else wants, since whoever looks does so from a machine of their own.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.figures import Figure, Target, figure_table
from benchmarks.record import Run, write_run
from benchmarks.spread import middle_half
from loadgen.errors import LoadgenError
from loadgen.peers.base import ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.dtypes import AUTO
from loadgen.processes.process import free_port, running_server
from loadgen.results.tables import to_markdown, to_rich

AGENTS = ("--agents", "80", "--rate", "0.2", "--context", "1024", "--turns", "6", "--think", "10:20", "--seed", "1")
FEW = ("--agents", "3", "--rate", "2", "--context", "192", "--turns", "2", "--think", "1:2", "--seed", "1")
KV_TOKENS = 20 * 1024
MOST = Target(1.02)
IDLE = ("chrt", "--idle", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun(Run):
    """Medians of resumed turns' first tokens, in seconds: those of pair k are entries k. `agents`: of the generator."""

    agents: tuple[str, ...]
    without_page_s: list[float]
    with_page_s: list[float]


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.page", __doc__)
    parser.add_argument("--pairs", type=int, choices=range(2, 21), default=3, metavar="2..20", help="default 3")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _run(arguments, Console()))


def _run(arguments: argparse.Namespace, console: Console) -> None:
    bind_to_cores(arguments.cores)
    agents = FEW if arguments.quick else AGENTS
    medians: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(arguments.pairs):
        for with_page in (pair % 2 == 1, pair % 2 == 0):
            words = "with the page" if with_page else "without it"
            with console.status(f"pair {pair + 1} of {arguments.pairs}, {words}"):
                medians[with_page].append(resumed_median_s(arguments.model, agents, with_page=with_page))
            console.print(f"pair {pair + 1}, {words}: {1e3 * medians[with_page][-1]:.1f} ms")
    run = PageRun(model=arguments.model.name, agents=agents, without_page_s=medians[False], with_page_s=medians[True])
    table = figure_table("Resumed turns' first token, median of a run", figures_of(run))
    console.print(to_rich([table]))
    if not arguments.quick:
        heading = f"# What the open page costs: {run.model} on {run.place_and_time}\n\n"
        console.print(f"written: {write_run(arguments.output, 'page-', run, heading + to_markdown(table))}")


def figures_of(run: PageRun) -> list[Figure]:
    """The lines of the table."""
    ratios = [seen / alone for seen, alone in zip(run.with_page_s, run.without_page_s, strict=True)]
    return [
        Figure("without the page", "ms", middle_half([1e3 * each for each in run.without_page_s])),
        Figure("with the page", "ms", middle_half([1e3 * each for each in run.with_page_s])),
        Figure("with it over without it", "×", middle_half(ratios), MOST),
    ]


def resumed_median_s(model: Path, agents: tuple[str, ...], *, with_page: bool) -> float:
    """The median of a run's first tokens of resumed turns, on a server of its own. Raises `LoadgenError`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    launch = DjinnPeer("djinn", "signal").launch(ServerSettings(model, AUTO, kv_tokens=KV_TOKENS), port)
    with running_server(launch.command, launch.environment, url), tempfile.TemporaryDirectory() as folder:
        with open_page(url) if with_page else nullcontext():
            command = [sys.executable, "-m", "loadgen", "density", "--target", f"djinn={url}", *agents]
            ended = subprocess.run([*command, "--output", folder], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise LoadgenError(ended.stderr or ended.stdout)
        [result] = Path(folder).glob("density-*.json")
        median: float = json.loads(result.read_bytes())["targets"][0]["summary"]["ttft_resumed_s"]["p50"]
        return median


@contextmanager
def open_page(url: str) -> Iterator[None]:
    """The page in a browser until the block ends. Raises `LoadgenError` without a browser, or for errors there."""
    path = shutil.which("chromium")
    if path is None:
        raise LoadgenError("Chromium must be installed: apt-get install chromium")
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        wrapper = Path(folder) / "chromium"
        wrapper.write_text(f'#!/bin/sh\nexec {" ".join(IDLE)} {path} "$@"\n')
        wrapper.chmod(0o700)
        with playwright.chromium.launch(executable_path=wrapper, args=["--no-sandbox", "--disable-gpu"]) as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(url)
            page.get_by_role("heading", name="Sessions").first.wait_for()
            yield
    if errors:
        raise LoadgenError(f"the page had an error: {errors[0]}")


if __name__ == "__main__":
    sys.exit(main())

"""How soon the lens is seen as a heatmap: `python -m benchmarks.heatmap`, a minute. A turn pauses after the last layer,
and the page in Chromium, on the same cores, asks for 64 tokens by all layers and draws those in sight.

Painted is the frame after the one in which every cell has its token, by the clock that the pause is told by.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from playwright.sync_api import Page, Response, sync_playwright
from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.page import ARGUMENTS, find_chromium
from benchmarks.record import Run, write_run
from benchmarks.spread import middle_half
from loadgen.peers.base import ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.dtypes import AUTO
from loadgen.processes.process import free_port, running_server
from loadgen.report.figures import Figure, Target
from loadgen.report.tables import figure_table, to_markdown, to_rich

POSITIONS = 64
PROMPT = "The lens shows what the model would say after each layer, if it had to say it there. " * 6
"""More tokens than are drawn at first."""
SCREEN: Any = {"width": 2560, "height": 1440}
WITHIN_MS = 30_000
SECONDS, KILOBYTES = Target(2.0), Target(100.0)
PAINTED = """(withinMs) => {
  window.painted = new Promise((done, fail) => {
    const look = () => {
      const isDrawn = document.querySelector(".heat .cell") && !document.querySelector(".heat .cell.bare");
      requestAnimationFrame(isDrawn ? () => done(Date.now() / 1000) : look);
    };
    look();
    setTimeout(() => fail(new Error("the map was not drawn")), withinMs);
  });
}"""


@dataclass(frozen=True, slots=True)
class Sight:
    """One heatmap: seconds from the pause to its paint, and the bytes that the server sent for it."""

    seconds: float
    answer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapRun(Run):
    """All heatmaps but the first, for which the browser compiles."""

    cores: int
    positions: int
    layers: int
    sights: list[Sight]


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.heatmap", __doc__)
    parser.add_argument("--rounds", type=int, choices=range(2, 101), default=10, metavar="2..100", help="default 10")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _measure(arguments, Console()))


def _measure(arguments: argparse.Namespace, console: Console) -> None:
    bind_to_cores(arguments.cores)
    rounds = 2 if arguments.quick else arguments.rounds
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    launch = DjinnPeer("djinn", "signal").launch(ServerSettings(arguments.model, AUTO, kv_tokens=8192), port)
    with (
        console.status("looking"),
        running_server(launch.command, launch.environment, url),
        httpx.Client(base_url=url, timeout=60) as http,
        opened_page() as page,
    ):
        layers: int = http.get("/version").raise_for_status().json()["num_layers"]
        sights = [look(page, http, layers) for _ in range(rounds + 1)][1:]
    run = HeatmapRun(
        model=arguments.model.name, cores=arguments.cores, positions=POSITIONS, layers=layers, sights=sights
    )
    table = figure_table(f"The lens of {POSITIONS} tokens x {layers} layers", figures_of(run))
    console.print(to_rich([table]))
    if not arguments.quick:
        heading = f"# How soon the lens is seen: {run.model} on {run.place_and_time}\n\n"
        console.print(f"written: {write_run(arguments.output, 'heatmap-', run, heading + to_markdown(table))}")


def figures_of(run: HeatmapRun) -> list[Figure]:
    """The lines of the table."""
    return [
        Figure("from the pause to the paint", "s", middle_half([each.seconds for each in run.sights]), SECONDS),
        Figure("the server's answers", "kB", middle_half([each.answer_bytes / 1e3 for each in run.sights]), KILOBYTES),
    ]


@contextmanager
def opened_page() -> Iterator[Page]:
    """A blank page of Chromium. Raises `LoadgenError` without a browser."""
    path = find_chromium()
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=ARGUMENTS) as browser,
    ):
        page = browser.new_page(viewport=SCREEN)
        page.set_default_timeout(WITHIN_MS)
        yield page


def look(page: Page, http: httpx.Client, layers: int) -> Sight:
    """A turn of a new session that pauses after the last layer, as somebody sees it who uses the page alone."""
    session = http.post("/v1/sessions", json={}).raise_for_status().json()["id"]
    answers: list[Response] = []
    page.goto(f"{http.base_url}#/sessions/{session}/model")
    page.on("response", lambda answer: answers.append(answer) if f"{session}/lens" in answer.url else None)
    page.get_by_label("Layers: choose one to pause after it").get_by_role("button").nth(layers - 1).click()
    page.get_by_label("Text", exact=True).fill(PROMPT)
    page.get_by_label("Most tokens").fill("1")
    page.evaluate(PAINTED, WITHIN_MS)
    page.get_by_role("button", name="Start the turn", exact=True).click()
    painted_at: float = page.evaluate("window.painted")
    paused_at = http.get(f"/v1/sessions/{session}").raise_for_status().json()["checkpoint"]["created_at"]
    time.sleep(0.2)  # answers of cells beyond the first ones belong to it too
    size = sum(len(each.body()) for each in answers)
    http.delete(f"/v1/sessions/{session}").raise_for_status()
    return Sight(painted_at - paused_at, size)


if __name__ == "__main__":
    sys.exit(main())

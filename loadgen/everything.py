"""`python -m loadgen all`: every experiment, and one page that leads to their reports."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.options.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, make_output
from loadgen.peers.registry import PEERS, find_peer
from loadgen.report.origin import machine, versions
from loadgen.report.page import environment
from loadgen.report.tables import duration


@dataclass(frozen=True, slots=True)
class Stage:
    """One experiment: the question that it answers, and its arguments when run at full size and `quick`."""

    experiment: str
    question: str
    full: str
    quick: str
    takes_rivals: bool = False

    def arguments(self, rivals: Sequence[str], *, quick: bool) -> list[str]:
        """Its command line, but for where the results go; `rivals` are further targets, by name."""
        added = [part for rival in rivals for part in ("--target", rival)] if self.takes_rivals else []
        return [self.experiment, *(self.quick if quick else self.full).split(), *added]


POLICIES = "--target djinn --target djinn+lru --target djinn+none"

STAGES = (
    Stage(
        "density",
        "How long do agents wait that come back after a tool call, when their KV does not fit the device?",
        full=f"{POLICIES} --kv 20x1024 --agents 80 --rate 0.2 --context 1024 --turns 6 --think 10:20 --seed 1",
        quick=f"{POLICIES} --kv 4x512 --agents 12 --rate 0.3 --context 448 --turns 3 --think 10:20 --seed 1 "
        "--completion-tokens 24 --resume-tokens 24 --time-scale 0.25",
        takes_rivals=True,
    ),
    Stage(
        "capacity",
        "How many agents does a server hold before those that come back wait too long?",
        full=f"{POLICIES} --kv 20x1024 --least 8 --most 128 --context 1024 --turns 6 --think 10:20 --seed 1",
        quick="--target djinn --target djinn+none --kv 4x512 --least 2 --most 16 --context 448 --turns 3 --think 10:20 "
        "--seed 1 --completion-tokens 24 --resume-tokens 24 --time-scale 0.25",
        takes_rivals=True,
    ),
    Stage(
        "whitebox",
        "Can a session be stopped between any two layers without a trace, and what do the others notice?",
        full="--target djinn --layers 8,16,24",
        quick="--target djinn --sequences 2 --tokens 16 --others 4 --pause-seconds 2 --repeats 2",
    ),
    Stage(
        "kv",
        "How large is KV, does it pay to compress it, and to take it to another process?",
        full="--target from=djinn --to to=djinn",
        quick="--target from=djinn --to to=djinn --quick",
    ),
)


PICTURES = 2
"""How many of a report's figures the index shows."""

OUTCOMES = {0: "all went well", 1: "something failed, or missed its target", 2: "could not run", 130: "interrupted"}
"""By exit code."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended; `page` is None if it wrote none. The figures lie beside the page, under its name."""

    stage: Stage
    exit_code: int
    seconds: float
    page: Path | None

    @property
    def words(self) -> str:
        """How it ended, and after how long."""
        return f"{OUTCOMES.get(self.exit_code, f'broke off with exit code {self.exit_code}')}, {duration(self.seconds)}"

    @property
    def pictures(self) -> list[str]:
        """File names of the first figures of its report."""
        if self.page is None:
            return []
        drawn = self.page.parent.glob(f"{self.page.stem}-*.png")
        return [path.name for path in sorted(drawn, key=lambda path: path.stat().st_mtime_ns)[:PICTURES]]


def write_index(outcomes: Sequence[Outcome], command: Sequence[str], folder: Path) -> Path:
    """Write `folder`/index.html anew; returns its path. Raises OSError."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    path = folder / "index.html"
    path.write_text(
        environment()
        .get_template("index.html")
        .render(outcomes=outcomes, lead=(" ".join(command), str(machine()), packages)),
        encoding="utf-8",
    )
    return path


RIVALS = ("vllm", "llamacpp")
"""Peers that take part in `density` and `capacity` wherever they are installed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """How large, with whom, and where it goes."""
    parser.add_argument("--quick", action="store_true", help="all experiments small: a quarter of an hour on two cores")
    parser.add_argument(
        "--only",
        metavar="EXPERIMENT,...",
        help=f"some of {', '.join(stage.experiment for stage in STAGES)} (default: all)",
    )
    parser.add_argument(
        "--rivals",
        metavar="PEER,PEER,...",
        help=f"servers to compare with Djinn, or none (default: of {', '.join(RIVALS)} those that are installed)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report"), metavar="DIR", help="folder for the results (default: report)"
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run every stage, and write the index after each; returns the exit code.

    Raises `LoadgenError` for a rival or an experiment that there is not.
    """
    stages, rivals, folder = _stages(options.only), _rivals(options.rivals, progress), make_output(options)
    outcomes: list[Outcome] = []
    for number, stage in enumerate(stages, 1):
        progress.rule(f"{number} of {len(stages)}: {stage.experiment}")
        outcomes.append(_run_stage(stage, rivals, options))
        index = write_index(outcomes, options.command, folder)
        if outcomes[-1].exit_code == EXIT_INTERRUPTED:
            break
    for outcome in outcomes:
        print(f"{outcome.stage.experiment}: {outcome.words}")
    print(f"results: {index}")
    if outcomes[-1].exit_code == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(outcome.exit_code for outcome in outcomes) else EXIT_OK


def _run_stage(stage: Stage, rivals: Sequence[str], options: argparse.Namespace) -> Outcome:
    before = set(options.output.glob("*.html"))
    started = time.monotonic()
    code = _run_alone([*stage.arguments(rivals, quick=options.quick), "--output", str(options.output)])
    pages = set(options.output.glob(f"{stage.experiment}-*.html")) - before
    return Outcome(stage, code, time.monotonic() - started, next(iter(pages), None))


def _run_alone(arguments: Sequence[str]) -> int:
    """Run one command in a process of its own, so that what one leaves behind does not slow the next.

    It hears of each Ctrl-C from here, and not from the terminal too: after the first it writes what it has measured,
    which a second would keep it from. The stages that follow do not run, whatever it ends with.
    """
    command = [sys.executable, "-m", "loadgen", *arguments]
    interrupted = False
    with subprocess.Popen(command, start_new_session=True) as process:
        while True:
            try:
                code = process.wait()
                return EXIT_INTERRUPTED if interrupted else code
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)


def _stages(text: str | None) -> list[Stage]:
    names = [stage.experiment for stage in STAGES] if text is None else text.split(",")
    if unknown := set(names) - {stage.experiment for stage in STAGES}:
        there = ", ".join(stage.experiment for stage in STAGES)
        raise LoadgenError(f"there is no experiment {min(unknown)!r} for --only, only {there}")
    return [stage for stage in STAGES if stage.experiment in names]


def _rivals(text: str | None, progress: Console) -> list[str]:
    """Those that are named, or else those that are installed, and a line about each that is not."""
    if text is None:
        usual = [peer for peer in PEERS if peer.name in RIVALS]
        for peer in usual:
            if not peer.is_installed():
                line = f"{peer.name} takes no part: it is not installed; python -m loadgen peers install {peer.name}"
                progress.print(line, markup=False, soft_wrap=True)
        return [peer.name for peer in usual if peer.is_installed()]
    names = [name for name in text.split(",") if name not in ("", "none")]
    return [find_peer(name).name for name in names]

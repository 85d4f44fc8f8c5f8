"""`python -m loadgen all`: every experiment, and one page that leads to their reports."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.everything.index import Outcome, write_index
from loadgen.everything.stages import STAGES, Stage
from loadgen.options.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, make_output
from loadgen.peers.registry import PEERS, find_peer

RIVALS = ("vllm", "llamacpp")
"""Peers that take part in `density` and `capacity` wherever they are installed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """How large, with whom, and where it goes."""
    parser.add_argument(
        "--quick", action="store_true", help="every experiment small: a quarter of an hour on two cores"
    )
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

"""`python -m loadgen all`: every experiment, and one page that leads to their reports."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

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
        "--rivals",
        metavar="PEER,PEER,...",
        help=f"who runs the agents beside Djinn, or none (default: of {', '.join(RIVALS)} those that are installed)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report"), metavar="DIR", help="folder for the results (default: report)"
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run every stage, and write the index after each; returns the exit code.

    Raises `LoadgenError` for a rival that there is not.
    """
    rivals, folder = _rivals(options.rivals), make_output(options)
    outcomes: list[Outcome] = []
    for number, stage in enumerate(STAGES, 1):
        progress.rule(f"{number} of {len(STAGES)}: {stage.experiment}")
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


def _rivals(text: str | None) -> list[str]:
    if text is None:
        return [peer.name for peer in PEERS if peer.name in RIVALS and peer.is_installed()]
    names = [name for name in text.split(",") if name not in ("", "none")]
    return [find_peer(name).name for name in names]

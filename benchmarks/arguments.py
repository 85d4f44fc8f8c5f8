"""What every benchmark's command line has in common."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import RESULTS
from loadgen.errors import LoadgenError
from loadgen.options.ending import sigterm_as_interrupt
from loadgen.processes.folders import default_model

FAILED, USAGE_ERROR = 1, 2


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that already knows --model, --cores, --quick and --output."""
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--model", type=Path, default=default_model().expanduser(), help="a Transformers folder")
    parser.add_argument("--cores", type=int, choices=range(1, 257), default=2, metavar="1..256", help="default 2")
    parser.add_argument("--quick", action="store_true", help="a short run to see that all works; writes no file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results")
    return parser


def exit_status(model: Path, benchmark: Callable[[], None]) -> int:
    """Runs the benchmark of `model` if it is there; what goes wrong with the model or a server is a message."""
    if not (model / "tokenizer.json").exists():
        print(f"no model in {model}: `djinn models pull smollm2-135m-instruct` first", file=sys.stderr)
        return USAGE_ERROR
    try:
        with sigterm_as_interrupt():
            benchmark()
    except LoadgenError as error:
        print(error, file=sys.stderr)
        return FAILED
    return 0

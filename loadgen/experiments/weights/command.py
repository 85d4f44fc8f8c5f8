"""`python -m loadgen weights`."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.experiments.weights.experiment import run_sweep, run_weights
from loadgen.experiments.weights.page import write_weights
from loadgen.experiments.weights.plan import QUICK, WeightsPlan
from loadgen.experiments.weights.setup import Setup
from loadgen.experiments.weights.sizes import Budget, parse_bytes, read_model_bytes
from loadgen.experiments.weights.tables import tables
from loadgen.options.common import add_common, finish, make_output, read_corpus, with_origin
from loadgen.options.plan_fields import add_plan_options, integers, read_plan, with_default
from loadgen.options.servers import add_server_options, read_settings
from loadgen.options.targets import run_on
from loadgen.peers.dtypes import AUTO, ELEMENT_BYTES
from loadgen.processes.folders import peers_folder
from loadgen.results.tables import to_rich

FULL = WeightsPlan()
OPTIONS = {
    "prompt": "tokens of prompt that the sessions of a batch share out",
    "tokens": "tokens generated in each session",
    "repeats": "how often each way is measured",
    "seed": "of texts",
}
BUDGET = "1/6"
DTYPE = "float32"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, its budget, and the fields of `WeightsPlan`. All servers are started for the run."""
    add_server_options(parser, kv=None, dtype=DTYPE)
    add_common(parser)
    parser.add_argument(
        "--budget",
        type=_budget,
        default=_budget(BUDGET),
        metavar="SIZE",
        help=f"weights on the device: bytes such as 90MiB, or a share of the model's (default: {BUDGET})",
    )
    batches = with_default("sessions at once", FULL, QUICK, "batches")
    parser.add_argument("--batches", type=integers, metavar="N,N,...", help=batches)
    parser.add_argument(
        "--cold", action="store_true", default=None, help="the smallest batch also with weights that come from the disk"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="measure Djinn alone, with copies of each size, and choose one"
    )
    parser.add_argument(
        "--chunks",
        type=_sizes,
        metavar="SIZE,SIZE,...",
        help="sizes of copies to choose from (default: 16MiB to 512MiB)",
    )
    add_plan_options(parser, FULL, QUICK, OPTIONS)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan, corpus, folder = _plan(options), read_corpus(options), make_output(options)
    with _setup(options, plan) as setup:
        if options.sweep:
            report = run_on(setup.chunked_servers(plan), lambda specs: run_sweep(specs, setup, plan, corpus, progress))
        else:
            report = run_on(setup.servers(plan), lambda specs: run_weights(specs, setup, plan, corpus, progress))
    report = with_origin(report, options)
    return finish(report, to_rich(tables(report)), partial(write_weights, report, folder))


def _plan(options: argparse.Namespace) -> WeightsPlan:
    if options.chunks is not None and not options.sweep:
        raise LoadgenError("--chunks are for --sweep")
    if options.sweep:
        if options.cold or options.batches:
            raise LoadgenError("--sweep has one session, and weights in the page cache: leave --batches and --cold out")
        options.batches = (1,)
    return read_plan(options, FULL, QUICK)


@contextmanager
def _setup(options: argparse.Namespace, plan: WeightsPlan) -> Iterator[Setup]:
    """What runs. Its scratch folder, where no memory poses as a disk, is gone at the end of the block."""
    settings = read_settings(options, kv_tokens=plan.kv_tokens)
    if settings.dtype == AUTO:
        raise LoadgenError(f"--dtype is {AUTO}, but the budget counts bytes: name {', '.join(ELEMENT_BYTES)}")
    size = read_model_bytes(settings.model, settings.dtype)
    budget = options.budget.of(size.total)
    if budget >= size.total:
        raise LoadgenError(f"--budget must be less than the {size.total} bytes of the model, not {budget}")
    peers_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weights-", dir=peers_folder()) as folder:
        yield Setup(settings, size, budget, Path(folder))


def _budget(text: str) -> Budget:
    try:
        return Budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_bytes(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

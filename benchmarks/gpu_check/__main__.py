"""`python -m benchmarks.gpu_check`: what has to be seen on a GPU, in ten minutes.

It needs the checkout, Python, PyTorch with Triton, and Transformers; what else a stage needs can be carried along as
wheels (`make gpu-wheels`, then --wheels).
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_check.overlay import ROOT, BadWheels, prepare

FAILED, USAGE_ERROR = 1, 2
LIMIT_S = 570.0


def main() -> int:
    """Runs the check. 0: every stage ran, or had a reason not to, and met its targets; 1: otherwise."""
    options = _read_options()
    with tempfile.TemporaryDirectory() as packages:
        try:
            prepare(options.wheels, Path(packages))
        except BadWheels as error:
            print(error, file=sys.stderr)
            return USAGE_ERROR
        from benchmarks.gpu_check.running import run_check, write_page_of

        if options.page is not None:
            return write_page_of(options.page)
        return 0 if run_check(options) else FAILED


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_check", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="the same stages on a CPU with SmolLM2's shape")
    where.add_argument("--tiny", action="store_true", help="the same stages on a CPU with a tiny model, in a minute")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="this stage; repeat for more")
    parser.add_argument(
        "--profile", action="append", default=[], metavar="STAGE", help="trace this stage too, target missed or not"
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that this machine lacks")
    parser.add_argument("--time-limit", type=float, default=LIMIT_S, metavar="S", help=f"default {LIMIT_S:g}")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for results")
    parser.add_argument("--page", type=Path, metavar="JSON", help="only draw the page of an earlier run")
    options = parser.parse_args()
    if options.time_limit <= 0:
        parser.error("--time-limit must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())

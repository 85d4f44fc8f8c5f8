"""`python -m docs.notebooks [--write] [NAME ...]` runs the notebooks of that name, or all.

A cell that fails ends it. `--write` keeps what the notebooks print and draw.
"""

import argparse
from collections.abc import Sequence

import nbformat

from docs.notebooks.execution import FOLDER, execute, names, signed


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, and run the notebooks."""
    parser = argparse.ArgumentParser(prog="python -m docs.notebooks", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep what they print and draw")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    given = parser.parse_args(argv)
    for name in given.names or names():
        print(name, flush=True)
        ran = execute(name)
        if given.write:
            nbformat.write(signed(ran), FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()

"""`python -m docs.notebooks [NAME ...]` runs the notebooks of that name, or all, and keeps what they print and draw."""

import sys

import nbformat

from docs.notebooks.execution import FOLDER, execute, names, signed

if __name__ == "__main__":
    for name in sys.argv[1:] or names():
        print(name, flush=True)
        nbformat.write(signed(execute(name)), FOLDER / f"{name}.ipynb")

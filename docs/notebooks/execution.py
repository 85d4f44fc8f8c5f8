"""Runs of the notebooks: each from its first cell to its last in a new kernel, as a reader would."""

import hashlib
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).parent
CELL_TIMEOUT_S = 300
SIGNATURE = "outputs_of"
"""In the metadata: the digest of the code that the outputs are of."""


def names() -> list[str]:
    """The notebooks, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> NotebookNode:
    """A notebook as it is."""
    notebook: NotebookNode = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return notebook


def execute(name: str, *, then: str = "") -> NotebookNode:
    """The notebook with new outputs. `then` is code for a further cell.

    Raises `nbclient.exceptions.CellExecutionError` if a cell does, `CellTimeoutError` if one takes five minutes.
    """
    notebook = read(name)
    if then:
        notebook.cells.append(nbformat.v4.new_code_cell(then))
    NotebookClient(
        notebook,
        config=Config(KernelManager={"transport_encryption": "required"}),
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    return notebook


def signed(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the digest of its code, and without what differs between kernels."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        SIGNATURE: digest(notebook),
    }
    return notebook


def digest(notebook: NotebookNode) -> str:
    """SHA-256 of the code of all cells, in their order."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()

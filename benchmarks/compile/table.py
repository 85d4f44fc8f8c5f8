"""The tables of compiled kernels. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.report.tables import Table

HEADER = (
    "for",
    "head",
    "group",
    "block",
    "type",
    "registers",
    "spilled, bytes",
    "shared, KiB",
    "tensor-core instructions",
    "asynchronous copies",
    "programs at once",
)
NOTE = "Registers and spilled bytes are of a thread, programs at once of a multiprocessor. `*_merge` joins split keys."
Row = dict[str, Any]


def kernel_tables(kernels: Sequence[Row]) -> list[Table]:
    """One for each compute capability."""
    found = dict.fromkeys(each["capability"] for each in kernels)
    return [_table(capability, [each for each in kernels if each["capability"] == capability]) for capability in found]


def summary(kernels: Sequence[Row]) -> str:
    """What one wants to know first."""
    spilled = [each for each in kernels if each["stack_bytes"]]
    most = max(spilled, key=lambda each: each["stack_bytes"], default=None)
    begin = f"{len(kernels)} kernels, {len(spilled)} of them spill registers"
    if most is None:
        return f"{begin}."
    where = f"{most['purpose']}, head {most['head_dim']}, {most['dtype']}, sm_{most['capability']}"
    return f"{begin}, {most['stack_bytes']} bytes at most ({where})."


def _table(capability: int, kernels: Sequence[Row]) -> Table:
    return Table.of(f"sm_{capability}", HEADER, [_cells(each) for each in kernels], NOTE)


def _cells(row: Row) -> tuple[str, ...]:
    name = f"{row['purpose']} {row['kernel']}" if row["kernel"] == "_merge" else row["purpose"]
    return (
        name,
        str(row["head_dim"]),
        str(row["group"]),
        str(row["block_size"]),
        row["dtype"],
        str(row["registers"]),
        str(row["stack_bytes"]),
        f"{row['shared_bytes'] / 1024:.1f}",
        str(row["mma"] + row["wgmma"]),
        str(row["async_copies"]),
        str(row["programs"]) if row["programs"] else "none",
    )

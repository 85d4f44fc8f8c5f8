"""The tables as a reader sees them."""

from io import StringIO

from rich.console import Console

from benchmarks.peers.report import ratio_table, variant_table
from loadgen.results.tables import to_markdown, to_rich
from tests.benchmarks.peers.test_summary import ROUNDS


def test_ratio_table_in_markdown() -> None:
    lines = to_markdown(ratio_table(ROUNDS)).splitlines()

    assert lines[2:4] == ["|  | Djinn | vLLM | Djinn vs. vLLM |", "| --- | ---: | ---: | ---: |"]
    assert lines[4] == ("| Throughput, 8 streams (tok/s) | 250.0 (float32) | 150.0 (bfloat16) | 3.00× [2.00, 4.00] |")
    assert lines[6] == "| First token of 1,000 (s) | 1.500 (float32) | 0.500 (bfloat16) | 0.38× [0.25, 0.50] |"


def test_without_djinn_there_is_nothing_to_compare_with() -> None:
    table = ratio_table([entry for entry in ROUNDS if entry.peer != "djinn"])

    assert table.header == ("", "vLLM")


def test_variant_table_has_a_column_for_every_data_type() -> None:
    table = variant_table(ROUNDS)

    assert table.header == ("", "Djinn float32", "vLLM float32", "vLLM bfloat16")
    assert table.rows[0][1:] == ("250.0 [200.0, 300.0]", "100.0", "150.0 [50.0, 160.0]")


def test_the_terminal_shows_every_cell() -> None:
    console = Console(width=160, record=True, file=StringIO())
    table = ratio_table(ROUNDS)

    console.print(to_rich([table]))

    shown = console.export_text()
    assert all(cell in shown for row in table.rows for cell in row)

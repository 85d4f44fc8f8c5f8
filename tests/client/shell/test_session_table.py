from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from client.models import SessionInfo
from client.shell.session_table import Row, fitting_table, session_table
from client.shell.wording import CONTROL
from tests.client.test_bad_servers import SESSION
from tests.examples import examples

pytestmark = pytest.mark.examples

SHORT_ID = 9
names = st.text(st.sampled_from("ab \u00e9\u4e16\u754c\U0001f600\x1b\n\t"), max_size=60)


def session(number: int, name: str) -> SessionInfo:
    return SESSION.model_copy(update={"id": f"ses_{number:036}", "metadata": {"name": name}, "tokens": 10**number})


def drawn(rows: list[Row], width: int, *, is_terminal: bool = True) -> list[str]:
    file = StringIO()
    shown = Console(file=file, width=width, color_system=None, force_terminal=is_terminal)
    shown.print(session_table(rows, shown))
    return file.getvalue().splitlines()


@settings(max_examples=examples(300))
@given(st.lists(names, min_size=1, max_size=4), st.integers(SHORT_ID + 9, 200))
def test_every_line_fits_and_names_are_cut_between_characters(texts: list[str], width: int) -> None:
    rows = [Row(session(number, name), number) for number, name in enumerate(texts)]
    header, *lines = drawn(rows, width)
    assert len(lines) == len(rows)
    assert all(cell_len(line) <= width for line in [header, *lines])
    assert not any(CONTROL.search(line) for line in lines)
    for line, text in zip(lines, texts, strict=True):
        if "\u2026" in line[SHORT_ID:]:
            name = line[SHORT_ID:].partition("\u2026")[0].strip()
            whole = " ".join(CONTROL.sub("\ufffd", text).split())
            assert whole.startswith(name)
            assert name != whole


@settings(max_examples=examples(100))
@given(st.lists(names, min_size=1, max_size=4))
def test_nothing_is_cut_where_no_terminal_is(texts: list[str]) -> None:
    rows = [Row(session(number, name), number) for number, name in enumerate(texts)]
    _, *lines = drawn(rows, 10_000, is_terminal=False)
    for line, row, text in zip(lines, rows, texts, strict=True):
        assert line.startswith(f"{row.info.id}  {' '.join(CONTROL.sub(chr(0xFFFD), text).split()) or '-'}")


def test_columns_go_before_figures_are_cut() -> None:
    rows = [Row(session(6, "planner"), 90000.0)]
    assert drawn(rows, 46)[1].split() == ["\u202600000006", "planner", "idle", "-", "1000000", "-"]
    assert drawn(rows, 20)[1].split() == ["\u202600000006", "idle"]


def test_the_first_rows_are_shown_and_the_others_counted() -> None:
    rows = [Row(session(number, "a"), 0) for number in range(9)]
    file = StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    console.print(fitting_table(rows, console, 6))
    lines = file.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[-1] == "and 5 more"
    assert len(drawn(rows, 100)) == 10

"""What the shell shows: tables of sessions, histories by lines, sizes and spans."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from client.models import History, SessionInfo
from client.shell.chat.views import history_lines, history_text
from client.shell.session_table import Row, fitting_table, session_table
from client.shell.wording import CONTROL, counted, harmless, on_one_line, size, span, visible
from tests.client.conftest import SESSION

SHORT_ID = 9
names = st.text(st.sampled_from("ab \u00e9\u4e16\u754c\U0001f600\x1b\n\t"), max_size=60)


def session(number: int, name: str) -> SessionInfo:
    return SESSION.model_copy(update={"id": f"ses_{number:036}", "metadata": {"name": name}, "tokens": 10**number})


def drawn(rows: list[Row], width: int, *, is_terminal: bool = True) -> list[str]:
    file = StringIO()
    shown = Console(file=file, width=width, color_system=None, force_terminal=is_terminal)
    shown.print(session_table(rows, shown))
    return file.getvalue().splitlines()


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


def history(*pieces: str) -> History:
    return History(tokens=len(pieces), token_ids=tuple(range(len(pieces))), text="".join(pieces), pieces=pieces)


def test_a_line_has_the_position_of_its_first_token() -> None:
    found = list(history_lines(history("user", "\n", "", "", "\u4e16", "x\ny", "z", "\n\n", "end")))
    assert found == [(0, "user"), (2, "\u4e16x"), (5, "yz"), (7, ""), (8, "end")]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert history_text(history("a\x1b[2J", "\n", "b")) == "      0  a\ufffd[2J\n      2  b"


@given(st.lists(st.text("a\n", max_size=3), max_size=12))
def test_lines_are_the_text_and_begin_where_it_does(pieces: list[str]) -> None:
    found = list(history_lines(history(*pieces, "end")))
    assert [line for _, line in found] == "".join([*pieces, "end"]).split("\n")
    for (first, line), (after, _) in pairwise(found):
        assert line in "".join(pieces[first : after + 1])


def test_sizes_spans_and_counts_are_short() -> None:
    sizes = {0: "0 B", 0.4: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1.5 * 2**30: "1.5 GiB", 5000 * 2**40: "5000.0 TiB"}
    assert {number: size(number) for number in sizes} == sizes
    spans = {-3: "0s", 59.9: "59s", 60: "1m", 7199: "1h", 86400 * 30: "30d"}
    assert {seconds: span(seconds) for seconds in spans} == spans
    assert [counted(count, "session") for count in (0, 1, 2)] == ["0 sessions", "1 session", "2 sessions"]


def test_a_terminal_obeys_no_text() -> None:
    assert harmless("a\x1b[31m\r\x9bb\nc\t\u4e16") == "a\ufffd[31m\ufffd\ufffdb\nc\t\u4e16"
    assert on_one_line(" a\n\tb\x07 ") == "a b\ufffd"
    assert visible(" a\n\x1b") == "\u00b7a\u21b5\ufffd"

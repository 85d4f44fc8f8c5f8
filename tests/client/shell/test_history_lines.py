from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from client.models import History
from client.shell.chat.views import history_lines, history_text


def history(*pieces: str) -> History:
    return History(tokens=len(pieces), token_ids=tuple(range(len(pieces))), text="".join(pieces), pieces=pieces)


def test_a_line_has_the_position_of_its_first_token() -> None:
    found = list(history_lines(history("user", "\n", "", "", "\u4e16", "x\ny", "z", "\n\n", "end")))
    assert found == [(0, "user"), (2, "\u4e16x"), (5, "yz"), (7, ""), (8, "end")]


def test_no_history_has_no_lines() -> None:
    assert list(history_lines(history())) == []
    assert history_text(history()) == ""


def test_a_model_cannot_steer_the_terminal() -> None:
    assert history_text(history("a\x1b[2J", "\n", "b")) == "      0  a\ufffd[2J\n      2  b"


@given(st.lists(st.text("a\n", max_size=3), max_size=12))
def test_lines_are_the_text_and_begin_where_it_does(pieces: list[str]) -> None:
    found = list(history_lines(history(*pieces, "end")))
    assert [line for _, line in found] == "".join([*pieces, "end"]).split("\n")
    for (first, line), (after, _) in pairwise(found):
        assert line in "".join(pieces[first : after + 1])

from __future__ import annotations

import pytest

from client.shell.wording import counted, harmless, on_one_line, size, span, visible


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (0.4, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (86400 * 30, "30d")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_one_of_a_kind_is_no_plural() -> None:
    assert [counted(count, "session") for count in (0, 1, 2)] == ["0 sessions", "1 session", "2 sessions"]


def test_a_terminal_obeys_no_text() -> None:
    assert harmless("a\x1b[31m\r\x9bb\nc\t\u4e16") == "a\ufffd[31m\ufffd\ufffdb\nc\t\u4e16"
    assert on_one_line(" a\n\tb\x07 ") == "a b\ufffd"
    assert visible(" a\n\x1b") == "\u00b7a\u21b5\ufffd"

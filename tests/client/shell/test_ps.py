"""`djinn ps` and `djinn top`. What the shell prints with: tables, lines of a history, sizes, spans, harmless text."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from app.cli import main
from client import Djinn, Session
from client.models import History, SessionInfo
from client.shell.chat.views import Thoughts, history_lines, history_text
from client.shell.overview import overview
from client.shell.rates import look, rates_between
from client.shell.session_table import Row, session_table
from client.shell.wording import CONTROL, harmless, on_one_line, visible
from tests.client.conftest import NOBODY, SESSION, AnswerWith
from tests.client.shell.terminals import CTRL_C, djinn_in_terminal
from tests.incident import NAMED, incident
from tests.processes import serve_process
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants
from tests.waiting import wait_until

WIDE = "\u4e16\u754c" * 20
BOTH_SCREENS = re.compile(r"\x1b\[\?1049h.*\x1b\[\?1049l", re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of these tests alone, with a session that has KV, one with a long name, and one that is paused."""
    with serve() as url, Djinn(url, timeout=30) as djinn:
        djinn.sessions.create(metadata={"name": "planner", "team": "7"}).generate(token_ids=[5, 6, 7], max_tokens=0)
        djinn.sessions.create(metadata={"name": WIDE})
        paused = djinn.sessions.create()
        paused.break_at(layer=1)
        paused.generate(token_ids=[5, 6], max_tokens=1)
        yield url


def test_it_lists_sessions_whole_and_without_colours(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url]) == 0
    header, first, second, third = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["NAME", "ID", "TURN", "PHASE", "PLACE", "TOKENS", "KV", "RETURNS", "USED"]
    with Djinn(url) as djinn:
        ids = [session.id for session in djinn.sessions.list()]
    assert first[:-1] == ["planner", "team=7", ids[0], "none", "compute", "device", "3", "16.0", "KiB", "-"]
    assert re.fullmatch(r"\d+[sm]", first[-1])
    assert second[:-1] == [WIDE, ids[1], "none", "compute", "none", "0", "-", "-"]
    assert third[:3] == ["-", ids[2], "paused"]


def test_json_is_what_the_server_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--json", "--state", "paused", "--url", url]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["checkpoint"]["layer"] == 1
    assert found["checkpoint"]["pass"] == "prefill"
    assert found["kv"]["device_bytes"] > 0
    for flags, count in ((("--state", "idle"), 2), (("--tier", "disk"), 0)):
        assert main(["ps", *flags, "--url", url]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1 + count


def test_operators_see_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"), tenant("ops", role="operator"))
    with serve(tenants=file) as url:
        monkeypatch.setenv("DJINN_API_KEY", "ops")
        for key in ("acme", "ops"):
            with Djinn(url, api_key=key) as djinn:
                djinn.sessions.create(metadata={"name": f"of {key}"})
        assert main(["ps", "--url", url]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["NAME", "ID", "TENANT"]
    found = [re.match(r"(.+?) +ses_\w+ +(\w+) ", row) for row in rows]
    assert [row and row.groups() for row in found] == [("-", "acme"), ("of ops", "ops")]


@pytest.mark.parametrize(
    ("command", "end", "status"),
    [(("ps", "--watch"), "q", 0), pytest.param(("top",), CTRL_C, 130, marks=pytest.mark.long)],
)
def test_watching_shows_what_comes_and_leaves_the_terminal_as_it_was(
    command: tuple[str, ...], end: str, status: int
) -> None:
    with (
        serve() as url,  # sessions that other tests have left could take all rows
        Djinn(url) as djinn,
        paused_session(djinn, "early"),
        djinn_in_terminal(*command, DJINN_BASE_URL=url) as terminal,
    ):
        terminal.expect("early")
        with paused_session(djinn, "late"):
            terminal.expect("late")
        terminal.type(end)
        assert terminal.end() == status
    assert BOTH_SCREENS.search(terminal.raw)
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")  # the cursor is back
    assert "Traceback" not in terminal.text


@pytest.mark.long
@pytest.mark.parametrize(("command", "shows"), [(("ps", "--watch"), "TURN"), (("top",), "turns: 0 running")])
def test_who_watches_sees_the_server_go_and_come_back(tmp_path: Path, command: tuple[str, ...], shows: str) -> None:
    with serve_process(tmp_path) as server, djinn_in_terminal(*command, DJINN_BASE_URL=server.url) as terminal:
        terminal.expect(shows)
        server.kill()
        terminal.expect(f"! no server answers at {server.url}")
        terminal.expect(shows)
        port = int(server.url.rpartition(":")[2])
        with serve(state_dir=tmp_path, port=port) as url, Djinn(url) as djinn, paused_session(djinn, "late"):
            terminal.expect("late")
        terminal.type("q")
        assert terminal.end() == 0


def test_no_server_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    url = NOBODY
    assert main(["ps", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"djinn: no server answers at {url} (")
    assert "Start one with djinn serve, or name another with --url or DJINN_BASE_URL\n" in err
    assert main(["ps", "--url", "localhost:8000"]) == 2
    assert "--url or DJINN_BASE_URL must be http://HOST[:PORT] or https://HOST" in capsys.readouterr().err


def test_a_key_is_asked_for_and_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(api_keys=("sesame",)) as url:
        wants, wrong = "wants an API key: put it into DJINN_API_KEY", "does not take the key in DJINN_API_KEY"
        monkeypatch.delenv("DJINN_API_KEY", raising=False)
        for says in (wants, wrong):
            assert main(["ps", "--url", url]) == 1
            assert capsys.readouterr().err == f"djinn: {url} {says}\n"
            monkeypatch.setenv("DJINN_API_KEY", "simsim")


def test_another_server_is_no_djinn(answer_with: AnswerWith, capsys: pytest.CaptureFixture[str]) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\n<html>\n\x1b[2J\n"
    assert main(["ps", "--url", answer_with(page)]) == 1
    err = capsys.readouterr().err
    assert "the answer is not what Djinn answers" in err
    assert len(err.splitlines()) == 1
    assert "\x1b" not in err


@pytest.mark.long
def test_who_stops_reading_hears_nothing_of_it(url: str) -> None:
    command = f"{sys.executable} -m app ps --json --url {url} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@contextmanager
def paused_session(djinn: Djinn, name: str) -> Iterator[Session]:
    with djinn.sessions.create(metadata={"name": name}) as session:
        session.break_at(layer=1)
        session.generate(token_ids=[5, 6, 7], max_tokens=2, ignore_eos=True)
        yield session


def test_it_shows_tiers_turns_and_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as url, Djinn(url) as djinn, paused_session(djinn, "planner") as session, djinn.sessions.create():
        assert main(["top", "--count", "2", "--url", url]) == 0
    first, second = capsys.readouterr().out.split("\n\ntiny-llama: ")
    assert first.startswith("tiny-llama: 2 sessions, KV policy signal\n")
    assert "turns: 0 running, 0 waiting, 1 paused; - tokens/s" in first
    assert "turns: 0 running, 0 waiting, 1 paused; 0.0 tokens/s" in second
    assert re.search(r"^device +0% +16.0 KiB +0 B +4.0 MiB +0 B +0 B$", second, re.MULTILINE)
    assert re.search(r"^host +0% .* 16.0 MiB", second, re.MULTILINE)
    assert re.search(r"^disk +- ", second, re.MULTILINE)
    (row,) = (line.split() for line in second.splitlines() if session.id in line)
    assert row[:3] == ["planner", session.id, "paused"]
    assert "0.0" in row


def test_a_small_terminal_shows_every_tier_whole(url: str) -> None:
    with Djinn(url) as djinn:
        seen, file = look(djinn), StringIO()
        console = Console(file=file, width=80, height=24, color_system=None, force_terminal=True)
        console.print(overview("tiny-llama", seen, rates_between(seen, seen), console))
    lines = file.getvalue().splitlines()
    assert len(lines) <= 24
    assert all(cell_len(line) <= 80 for line in lines)
    assert not any("…" in line for line in lines[:9])


def test_who_is_late_is_said() -> None:
    now = 1e9
    expected = SESSION.model_copy(update={"returns_at": now + 90})
    assert drawn([Row(expected, now)], 200)[1].split()[-4:-1] == ["-", "in", "1m"]
    assert drawn([Row(expected, now + 100)], 200)[1].split()[-4:-1] == ["-", "10s", "late"]


def test_what_is_wrong_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with incident(tmp_path) as of:
        monkeypatch.setenv("DJINN_API_KEY", "agents")

        def all_is_told() -> bool:
            assert main(["top", "--count", "1", "--url", str(of["agents"].base_url)]) == 0
            told = [line.removeprefix("! ") for line in capsys.readouterr().out.splitlines() if line.startswith("! ")]
            return all(any(re.match(each, line) for line in told) for each in NAMED)

        wait_until(all_is_told)
        mine = of["greedy"].get("/v1/findings").json()
    assert [re.sub(r"\d", "0", each["text"]) for each in mine["data"]] == ["0 turns in the queue"]
    assert mine["capacity"] is None


def test_rates_come_from_two_looks(server_url: str) -> None:
    with Djinn(server_url) as djinn, paused_session(djinn, "a") as session:
        before = replace(look(djinn), monotonic_s=10.0)
        session.step()
        after = replace(look(djinn), monotonic_s=12.0)
        rates = rates_between(before, after)
        grown = session.refresh().tokens - before.busy[session.id].tokens
        assert grown > 0
        assert rates.tokens[session.id] == grown / 2
        assert rates_between(after, before).tokens[session.id] == 0
        assert set(rates.moved_bytes) == {"out", "in", "to_disk", "from_disk"}


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
    rows = [Row(session(number, name), SESSION.used_at + number) for number, name in enumerate(texts)]
    header, *lines = drawn(rows, width)
    assert len(lines) == len(rows)
    assert all(cell_len(line) <= width for line in [header, *lines])
    assert not any(CONTROL.search(line) for line in lines)
    for line, text in zip(lines, texts, strict=True):
        cut = re.match(r"(.*?)\u2026 ", line)
        if cut and not line.startswith("\u2026"):
            name = cut[1].strip()
            whole = " ".join(CONTROL.sub("\ufffd", text).split())
            assert whole.startswith(name)
            assert name != whole


def history(*pieces: str) -> History:
    return History(tokens=len(pieces), token_ids=tuple(range(len(pieces))), text="".join(pieces), pieces=pieces)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert history_text(history("a\x1b[2J", "\n", "b")) == "      0  a\ufffd[2J\n      2  b"


@given(st.lists(st.text("a\n", max_size=3), max_size=12))
def test_lines_are_the_text_and_begin_where_it_does(pieces: list[str]) -> None:
    found = list(history_lines(history(*pieces, "end")))
    assert [line for _, line in found] == "".join([*pieces, "end"]).split("\n")
    for (first, line), (after, _) in pairwise(found):
        assert line in "".join(pieces[first : after + 1])


def test_thoughts_are_told_from_the_answer_however_they_come() -> None:
    for size in (1, 3, 100):
        told, text = Thoughts(), "<think>2 < 3</think>\nYes: 2 <t"
        parts = [*(each for at in range(0, len(text), size) for each in told.split(text[at : at + size])), told.end()]
        joined = ["".join(part for part, is_thought in parts if is_thought is wanted) for wanted in (True, False)]
        assert joined == ["2 < 3", "\nYes: 2 <t"]


def test_a_terminal_obeys_no_text() -> None:
    assert harmless("a\x1b[31m\r\x9bb\nc\t\u4e16\u202e") == "a\ufffd[31m\ufffd\ufffdb\nc\t\u4e16\ufffd"
    assert on_one_line(" a\n\tb\x07\u2066 ") == "a b\ufffd\ufffd"
    assert visible(" a\n\x1b") == "\u00b7a\u21b5\ufffd"

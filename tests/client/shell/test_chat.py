"""`djinn chat`."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from client import Djinn, NotFound
from tests.client.shell.terminals import CTRL_C, CTRL_D, Terminal, djinn_in_terminal
from tests.serving import serve

GREEDY = ("--temperature", "0", "--max-tokens", "6")
OPENED = r"session (ses_\w+) on http"
PROMPT = r"\n(?:layer \d+)?> \Z"
"""What is typed earlier than the prompt reaches the line discipline of the terminal, to which Ctrl-D means less."""
OVER = r"\((?:stop|length); \d+ tokens, \d+ of \d+ came from the KV cache\)"


@pytest.fixture(scope="module")
def djinn(server_url: str) -> Iterator[Djinn]:
    with Djinn(server_url, timeout=30) as djinn:
        yield djinn


def piped(url: str, lines: bytes, *flags: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The command with `lines` as its input, as in a script."""
    command = [sys.executable, "-m", "app", "chat", "--url", url, *GREEDY, *flags]
    return subprocess.run(command, input=lines, capture_output=True, timeout=60, env={**os.environ, **variables})


def opened(terminal: Terminal) -> str:
    session = terminal.expect(OPENED)[1]
    terminal.expect(PROMPT)
    return session


def leave(terminal: Terminal) -> int:
    """Ctrl-D at the prompt; returns the exit status."""
    terminal.expect(PROMPT)
    terminal.type(CTRL_D)
    return terminal.end()


def test_a_conversation_with_pause_lens_and_resume(server_url: str, djinn: Djinn) -> None:
    with djinn_in_terminal("chat", *GREEDY, DJINN_BASE_URL=server_url) as terminal:
        session = opened(terminal)
        assert djinn.sessions.get(session).info.metadata == {"name": "chat"}
        terminal.type("/pause 1 prefill\n")
        terminal.expect("pauses after layer 1")
        terminal.type("caf\u00e9 \u4e16\u754c\n")
        terminal.expect(r"paused after layer 1, positions 0 to \d+, pass prefill")
        terminal.expect("layer 1> ")
        assert djinn.sessions.get(session).info.state == "paused"
        terminal.type("/lens 3\n")
        terminal.expect(r"after layer 1, at position \d+, token .+\s+NEXT +PROBABILITY")
        probabilities = [float(terminal.expect(r"(\d+\.\d+)%")[1]) for _ in range(3)]
        assert probabilities == sorted(probabilities, reverse=True)
        terminal.type("/step 3\n")
        terminal.expect("paused after layer 3")
        terminal.type("/resume\n")
        terminal.expect(OVER)
        history = djinn.sessions.get(session).history().text
        assert "caf\u00e9 \u4e16\u754c<|im_end|>" in history
        terminal.type("/quit\n")
        assert terminal.end() == 0
    with pytest.raises(NotFound):
        djinn.sessions.get(session)


@pytest.mark.long
def test_a_fork_is_rewound_and_its_origin_is_not(server_url: str, djinn: Djinn) -> None:
    with djinn_in_terminal("chat", "--raw", *GREEDY, DJINN_BASE_URL=server_url) as terminal:
        origin = opened(terminal)
        terminal.type("hello\n")
        terminal.expect(OVER)
        before = djinn.sessions.get(origin).info.tokens
        terminal.type("/fork\n")
        fork = terminal.expect(rf"now in the fork (ses_\w+); /session {origin} goes back")[1]
        terminal.type("/rewind 3\n")
        terminal.expect("3 tokens left")
        terminal.type("/history\n")
        terminal.expect("0  <bos>he\r\n")
        terminal.type(f"/session {origin[-8:]}\n")
        terminal.expect(rf"{origin}: turn none, {before} tokens, .+ of KV, place device")
        assert djinn.sessions.get(fork).info.tokens == 3
        assert leave(terminal) == 0
    for session in (origin, fork):
        with pytest.raises(NotFound):
            djinn.sessions.get(session)


def test_ctrl_c_ends_the_turn_and_not_the_conversation() -> None:
    with serve() as url, Djinn(url, timeout=30) as djinn, djinn.sessions.create() as session:
        session.steer(layer=3, replace=np.eye(64)[0])  # every token is the same, and none is the last
        with djinn_in_terminal("chat", session.id, "--temperature", "0", DJINN_BASE_URL=url) as terminal:
            opened(terminal)
            for _ in range(5):  # on a busy machine the turn can be over before anybody hears of Ctrl-C
                terminal.type("hello\n")
                terminal.expect(r"(\S)\1\1|(<\d+>)\2")
                terminal.type(CTRL_C)
                reason = terminal.expect(r"\((\w+); \d+ tokens")[1]
                terminal.expect(PROMPT)
                if reason == "cancelled":
                    break
                terminal.type("/rewind 0\n")
                terminal.expect("0 tokens left")
                terminal.expect(PROMPT)
            assert reason == "cancelled"
            assert session.refresh().state == "idle"
            terminal.type("half a line")
            terminal.expect("half a line")  # Ctrl-C takes back what readline has not read, which then waits for it
            terminal.interrupt("/quit or Ctrl-D ends the conversation")
            terminal.type("/session\n")
            terminal.expect(f"{session.id}: turn none")
            assert leave(terminal) == 0
        assert session.refresh().state == "idle"


def test_mistakes_are_said_and_only_a_closed_session_ends_the_conversation(server_url: str, djinn: Djinn) -> None:
    with djinn_in_terminal("chat", DJINN_BASE_URL=server_url) as terminal:
        session = opened(terminal)
        for line, says in {
            "/paws 3": r"djinn: unknown command /paws; /help lists them",
            "/pause deep": r"djinn: deep is no number; usage: /pause \[LAYER",
            "/pause 3 sometimes": r"djinn: usage: /pause \[LAYER",
            "/pause 99": r"djinn: layer: .*99",
            "/rewind": r"djinn: usage: /rewind POSITION",
            "/fork now": r"djinn: usage: /fork",
            "/steer nothing": r"djinn: .*nothing",
            "/steer sad much": r"djinn: much is no number; usage: /steer",
            "/steer": r"nothing steers",
            "/lens": r"djinn: .* is idle, it must be paused",
            "/session zzz": r"djinn: the ids of no sessions end with zzz",
            "/session ses_0": r"djinn: no session ses_0",
        }.items():
            terminal.type(f"{line}\n")
            terminal.expect(says)
        terminal.expect("> ")  # it has asked for the session's state, as after each mistake
        djinn.sessions.get(session).close()
        terminal.type("hello\n")
        terminal.expect(f"djinn: no session {session}")
        assert terminal.end() == 1


@pytest.mark.long
def test_a_terminal_that_closes_leaves_no_session(server_url: str, djinn: Djinn) -> None:
    with djinn_in_terminal("chat", DJINN_BASE_URL=server_url) as terminal:
        session = opened(terminal)
        assert terminal.hang_up() != 0
    with pytest.raises(NotFound):
        djinn.sessions.get(session)


def test_a_vector_steers_from_where_it_is_said_on(server_url: str, djinn: Djinn) -> None:
    djinn.vectors.put("northwards", 8 * np.eye(64, dtype=np.float32)[5])
    script = "/steer northwards 2.5 1\n/steer\nhello\n/steer off\n/steer\n"
    done = piped(server_url, script.encode(), "--raw")
    assert (done.returncode, done.stderr) == (0, b"")
    with djinn.sessions.create() as session:
        session.steer(add="northwards", factor=2.5, layer=1)
        steered = session.generate(prompt="hello", max_tokens=6, temperature=0).text
    djinn.vectors.delete("northwards")  # other tests list those of this server
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", steered).rstrip("\n")
    assert done.stdout.decode() == f"add 2.5 x a vector of length 8.00 after layer 1\n{shown}\nnothing steers\n"


def test_in_a_pipe_only_answers_are_printed(server_url: str, djinn: Djinn) -> None:
    done = piped(server_url, "\u4e16\u754c\n".encode(), "--raw")
    assert (done.returncode, done.stderr) == (0, b"")
    with djinn.sessions.create() as session:
        answer = session.generate(prompt="\u4e16\u754c", max_tokens=6, temperature=0).text
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", answer)
    assert done.stdout.decode().rstrip("\n") == shown.rstrip("\n")


@pytest.mark.long
def test_a_kept_session_is_continued(server_url: str, djinn: Djinn) -> None:
    before = {session.id for session in djinn.sessions.list()}
    assert piped(server_url, b"a\n", "--raw", "--keep").returncode == 0
    (kept,) = (session for session in djinn.sessions.list() if session.id not in before)
    tokens = kept.info.tokens
    assert piped(server_url, b"b\n", kept.id[-8:], "--raw").returncode == 0
    with kept:
        assert kept.refresh().tokens > tokens


def test_in_a_script_a_mistake_is_the_end(server_url: str) -> None:
    done = piped(server_url, b"/bogus\n/session\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"djinn: unknown command /bogus" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_bytes_that_are_no_text_do_no_harm(server_url: str) -> None:
    done = piped(server_url, b"\xff\xfe\n/history\n", "--raw", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()

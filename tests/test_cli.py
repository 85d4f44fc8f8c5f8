"""The command line: what is refused, what ends a server, what serves nobody, and what shells complete."""

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from app.cli import main
from app.journal.journal import Journal
from tests.errors import assert_error
from tests.processes import ServerProcess, serve_process
from tests.serving import serve

READY = re.compile(r"Djinn serves (\S+) on (http://\S+:\d+)\n")
COMMANDS = "serve, cluster, demo, bench, ps, top, chat, backup, doctor, keys, models, completion"
TINY = ("--model", "random:tiny-llama", "--kv-device", "4MiB", "--state-dir", "none", "--port", "0")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    """Exit status, stdout and stderr of one command."""
    try:
        status: int | str | None = main(arguments)
    except SystemExit as leave:  # argparse
        status = leave.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), f"djinn: missing COMMAND: {COMMANDS}. See djinn --help"),
        (("fly",), f"djinn: unknown COMMAND 'fly': {COMMANDS}. See djinn --help"),
        (("ps", "--state", "flying"), "unknown --state 'flying': idle, queued, running, paused. See djinn ps --help"),
        (("chat", "--temperature", "nan"), "--temperature: a number from 0 to 100; got NaN. See djinn chat --help"),
        (("serve", "--port", "99999"), "djinn: --port: an integer from 0 to 65535; got '99999'"),
        (("serve", "--kv-devise", "3"), "unknown flag --kv-devise; did you mean --kv-device? See djinn serve --help"),
        (("serve", "--kv-device"), "djinn: --kv-device takes a value: SIZE. See djinn serve --help"),
        (("cluster", "forget", "a"), "djinn: --cluster: name the store of the cluster"),
        (
            ("cluster", "ended", "a", "--cluster", "etcd://x"),
            "djinn: --cluster: 'x' is no server of etcd: it needs HOST:PORT",
        ),
        (("serve", "--state-dir", ""), "djinn: --state-dir: name a folder; '.' is the current one"),
        (("serve", "--port", "0", "--model", "no-such-model"), "smollm2-135m-instruct"),
        (("serve", "--max-running", "9", "--max-step-tokens", "8"), "djinn: --max-running (9) must be at most --max-"),
        (("serve", "--kv-policy", "none", "--kv-host", "1MiB"), "djinn: --kv-host: with --kv-policy none KV never"),
        (
            ("serve", "--kv-host", "0", "--kv-disk", "20x512"),
            "djinn: --kv-disk: KV goes to disk over host memory, so --kv-host",
        ),
        (("serve", "--cluster", "x", "--cluster-key-file", "k"), "djinn: --cluster: the server itself needs a name"),
        (("models", "export", "random:tiny-llama"), "djinn: random:tiny-llama has random weights, and no folder"),
    ],
)
def test_what_the_user_got_wrong_is_a_message_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert says in err
    assert len(err.splitlines()) == 1
    assert out == ""


@pytest.mark.usefixtures("engine_in_a_thread")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "abacus"), "auto, cpu, cuda"),
        (("--kv-host", "5"), "djinn: --kv-host must be 0, or hold at least one block of 16384 bytes; got 5"),
        (("--weights-dtype", "float8"), "djinn: --weights-dtype: float8 needs a GPU of compute capability 8.9"),
        (("--weights-device", "10"), "djinn: --weights-device is 10 bytes"),
    ],
)
def test_what_the_engine_refuses_is_a_message_and_status_2(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    status, out, err = run(capsys, "serve", *TINY, *flags)
    assert (status, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_help_shows_flags_and_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "serve", "--help")
    assert status == 0
    assert "127.0.0.1" in out
    assert "--kv-device SIZE " in out
    assert "--block-size" not in out
    status, out, _ = run(capsys, "serve", "--help-all")
    assert status == 0
    assert "--block-size TOKENS" in out
    assert "(default: 16MiB)" in out
    for foreign in ("None", "KVBudget", "ByteSize", "Path", "tuple", " str ", " int "):
        assert foreign not in out


def test_version_tells_what_is_installed_and_what_would_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DJINN_DEVICE", "cpu")
    status, out, err = run(capsys, "--version")
    assert (status, err) == (0, "")
    assert dict(line.split(" ", 1) for line in out.splitlines()) == {
        "djinn": version("djinn-server"),
        "models": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def test_a_variable_that_no_server_would_start_with_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJINN_DEVICE", "abacus")
    assert run(capsys, "--version") == (2, "", "djinn: --device is 'abacus'; use auto, cpu, cuda or cuda:N\n")
    monkeypatch.setenv("DJINN_PROT", "1234")
    said = "djinn: unknown environment variable DJINN_PROT; see djinn serve --help\n"
    assert run(capsys, "serve") == (2, "", said)


def test_models_that_cannot_be_kept_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "file"
    cache.touch()
    monkeypatch.setenv("DJINN_CACHE_DIR", str(cache))
    status, out, err = run(capsys, "models", "pull", "smollm2-135m-instruct")
    assert (status, out) == (2, "")
    folder = cache / "gguf"
    assert err == f"djinn: cannot keep models in {folder}: Not a directory; name another folder with DJINN_CACHE_DIR\n"


@pytest.mark.usefixtures("engine_in_a_thread")
@pytest.mark.parametrize(("name", "kept"), [("kv", "KV"), ("tmp", "exports")])
def test_a_state_folder_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, kept: str
) -> None:
    (tmp_path / name).touch()
    status, out, err = run(capsys, "serve", *TINY, "--state-dir", str(tmp_path), "--kv-disk", "1MiB")
    assert (status, out) == (2, "")
    assert f"djinn: cannot keep {kept} in {tmp_path / name}: File exists; name another folder with --state-dir\n" in err


@pytest.mark.long
def test_an_idle_server_leaves_at_once_with_0() -> None:
    command = [sys.executable, "-m", "app", "serve", *TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = READY.fullmatch(process.stdout.readline())
            assert ready, process.stderr and process.stderr.read()
            assert ready[1] == "tiny-llama"
            assert httpx.get(f"{ready[2]}/ready").status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()


@contextmanager
def streaming(folder: Path, drain_s: str, max_tokens: int) -> Iterator[tuple[ServerProcess, httpx.Client, Any]]:
    """A server, a client, and the rest of a turn of so many tokens that it has begun to stream."""
    body = {"token_ids": [5, 6], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with (
        serve_process(folder / "state", "--drain-timeout-s", drain_s) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        session = http.post("/v1/sessions").json()["id"]
        with connect_sse(http, "POST", f"/v1/sessions/{session}/generate", json=body) as source:
            stream = source.iter_sse()
            next(stream)
            yield server, http, stream


def test_sigterm_refuses_new_work_and_ends_running_turns_in_time(tmp_path: Path) -> None:
    with streaming(tmp_path, "0.6", 1000) as (server, http, stream):
        other = http.post("/v1/sessions").json()["id"]
        os.kill(server.pid, signal.SIGTERM)
        while (ready := http.get("/ready")).status_code == 200:
            pass
        assert_error(ready, 503, "draining")
        assert int(ready.headers["Retry-After"]) >= 1
        assert_error(http.post("/v1/sessions"), 503, "draining")
        assert_error(http.post(f"/v1/sessions/{other}/generate", json={"prompt": "a"}), 503, "draining")
        *_, last = stream
        assert (last.event, last.json()["finish_reason"]) == ("finished", "cancelled")
        assert server.exit_status(15) == 0


def test_a_turn_that_ends_in_time_is_not_cut_short(tmp_path: Path) -> None:
    """Linux tells of a parent's end once for each of its threads: that is no second signal."""
    with streaming(tmp_path, "30", 600) as (server, _, stream):
        for _ in range(5):
            os.kill(server.pid, signal.SIGTERM)
            time.sleep(0.005)
        *_, last = stream
        assert last.json()["finish_reason"] == "length"
        assert server.exit_status(15) == 0


def test_a_server_without_files_drains_at_a_hangup_and_is_in_no_hurry(tmp_path: Path) -> None:
    with streaming(tmp_path, "60", 1000) as (server, http, stream):
        os.kill(server.pid, signal.SIGHUP)
        while http.get("/ready").status_code == 200:
            pass
        os.kill(server.pid, signal.SIGHUP)
        *_, last = stream
        assert last.json()["finish_reason"] == "length"
        assert server.exit_status(30) == 0


def test_a_second_ctrl_c_ends_the_server_at_once(tmp_path: Path) -> None:
    log = tmp_path / "state.out"
    with streaming(tmp_path, "60", 1000) as (server, _, stream):
        os.kill(server.pid, signal.SIGINT)
        while "a second signal ends the server at once\n" not in log.read_text():
            assert server.exit_status(0.01) is None
        os.kill(server.pid, signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):
            list(stream)
        assert server.exit_status(15) == 0
    assert "Traceback" not in log.read_text()
    assert "answers under way" not in log.read_text()  # they have no time any more


def test_a_new_key_opens_a_server_that_has_its_digest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "keys", "new")
    assert status == 0
    found = dict(line.split() for line in out.splitlines())
    assert run(capsys, "keys", "new")[1] != out
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants:\n  - name: acme\n    keys:\n      - sha256: {found['sha256:']}\n")
    with serve(tenants=file) as url:
        assert httpx.get(f"{url}/v1/models", headers={"X-Api-Key": found["key:"]}).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"X-Api-Key": found["sha256:"]}).status_code == 401


def test_a_port_and_a_file_that_cannot_be_had_are_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = run(capsys, "serve", "--model", "no-such-model", "--port", port)
    assert status == 2
    assert f"port {port}" in err
    assert "in use; choose another with --port" in err
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n  - name: acme\n")
    status, _, err = run(capsys, "serve", "--model", "no-such-model", "--port", "0", "--tenants", str(file))
    assert (status, err) == (2, f"djinn: --tenants file {file}: tenants.0.keys: required\n")


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment that a container image has, without a key; returns the folder of its state."""
    state = tmp_path / "state"
    for name, value in {"HOST": "0.0.0.0", "DEVICE": "cpu", "STATE_DIR": state, "CACHE_DIR": tmp_path}.items():
        monkeypatch.setenv(f"DJINN_{name}", str(value))
    return state


def test_what_serves_nobody_needs_no_key(capsys: pytest.CaptureFixture[str], image: Path, tmp_path: Path) -> None:
    for command in ("--version", "models list", "keys new", "completion bash", "serve --help"):
        status, out, err = run(capsys, *command.split())
        assert (status, err) == (0, "")
        assert out
    assert "smollm2-135m-instruct" in run(capsys, "models", "pull", "no-such-model")[2]
    assert "has random weights" in run(capsys, "models", "export", "random:tiny-llama")[2]
    _, out, err = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert (report["device"], report["facts"]["disk"]["folder"], err) == ("cpu", str(image.parent), "")
    Journal(image).close()
    status, out, err = run(capsys, "backup", str(tmp_path / "copy"))
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'copy'}: 0 sessions")


@pytest.mark.usefixtures("image")
def test_a_server_for_everybody_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "serve", "--model", "no-such-model", "--port", "0")
    assert (status, out) == (2, "")
    assert err.startswith("djinn: --host 0.0.0.0 is public: ")
    assert "set --api-keys or --tenants, or --insecure" in err


ASK_BASH = r"""
source "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
_shtab_djinn
printf '%s\n' "${COMPREPLY[@]}"
"""


def script_of(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    path = folder / f"djinn.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def ask_shell(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True, env={**os.environ, **variables}
    )
    assert done.stderr == ""
    return done.stdout


def ask_bash(script: Path, *words: str) -> set[str]:
    return {word.strip() for word in ask_shell("bash", "-c", ASK_BASH, "bash", str(script), *words).splitlines()}


def test_bash_completes_commands_flags_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("bash", tmp_path, capsys)
    assert {"serve", "ps", "top", "chat", "completion"} <= ask_bash(script, "djinn", "")
    assert {"--json", "--watch", "--url"} <= ask_bash(script, "djinn", "ps", "--")
    assert ask_bash(script, "djinn", "ps", "--state", "pa") == {"paused"}
    assert ask_bash(script, "djinn", "serve", "--kv-policy", "") == {"signal", "lru", "none"}
    assert {"--full", "--rivals", "--output"} <= ask_bash(script, "djinn", "bench", "--")
    assert "smollm2-135m-instruct" in ask_bash(script, "djinn", "models", "pull", "")
    (tmp_path / "states").mkdir()
    assert str(tmp_path / "states") in ask_bash(script, "djinn", "serve", "--state-dir", f"{tmp_path}/st")


def test_fish_completes_commands_flags_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("fish", tmp_path, capsys)

    def ask(line: str) -> set[str]:
        found = ask_shell("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'", HOME=str(tmp_path))
        return {each.partition("\t")[0] for each in found.splitlines()}

    assert {"serve", "ps", "top", "chat", "completion"} <= ask("djinn ")
    assert {"--json", "--watch", "--url"} <= ask("djinn ps --")
    assert ask("djinn ps --state pa") == {"paused"}


def test_zsh_loads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("zsh", tmp_path, capsys)
    assert script.read_text().startswith("#compdef djinn\n")
    setup = f'autoload -Uz compinit; compinit -u -d {tmp_path}/dump; eval "$(< {script})"; print $_comps[djinn]'
    assert ask_shell("zsh", "-f", "-c", setup).strip() == "_shtab_djinn"

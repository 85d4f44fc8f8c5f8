"""Follow a page as its reader would: one shell runs all of its commands and Python, in their order.

The model has as many layers as SmolLM2-135M but is tiny, servers listen on another port, and experiments are small.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from docs.site.pages import ROOT

NAME = "smollm2-135m-instruct"
LAYERS = 30
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVES = re.compile(r"^(make serve|\.venv/bin/djinn serve .*)$", re.MULTILINE)
NOT_RUN = ".venv/bin/python -m loadgen peers install vllm"
LATE = "--agents 3 --turns 2"
LOAD = "--system-tokens 8 --context 48 --resume-tokens 16 --completion-tokens 4 --think 0.2:0.3"
SMALLER = {
    "density": f"--model $MODEL --dtype float32 --kv 4x256 --rate 10 {LATE} {LOAD} --output runs",
    "capacity": f"--model $MODEL --dtype float32 --kv 4x256 --least 1 --most 2 --turns 2 {LOAD}",
    "whitebox": "--sequences 1 --tokens 4 --others 1 --pause-seconds 0.5 --layers 7 --output runs",
}
"""What follows the options of an experiment, and so takes their place."""
MAY_MISS = "whitebox"
"""The experiment with targets that a busy machine misses: exit status 1."""
START = """
set -eu -o pipefail
SERVER=
stop() { [ -z "$SERVER" ] || { kill "$SERVER"; wait "$SERVER" || true; SERVER=; }; }
trap stop EXIT
serve() {
    stop
    "$@" &
    SERVER=$!
    until curl -sf http://127.0.0.1:$PORT/ready > ready.json; do kill -0 "$SERVER"; sleep 0.1; done
}
make() {
    grep -q "^$1: " "$ROOT/Makefile"
    if [ "$1" = serve ]; then exec .venv/bin/djinn serve; fi
}
"""
DJINN = f"""#!/usr/bin/env bash
case "$1" in
    models) "$PYTHON" -m app models list | grep -q "$3" ;;  # known by name: no test downloads it here
    serve) exec "$PYTHON" -m app "$@" --model "$MODEL" --served-name {NAME} --port "$PORT" ;;
    doctor) "$PYTHON" -m app "$@" || [ $? = 1 ] ;;  # an error of this machine
    *) exit 2 ;;
esac
"""


def follow(page: Path, folder: Path, model: Path, timeout_s: float) -> str:
    """Run the page in an empty `folder`; returns what it printed. If a command fails, an `AssertionError` has that."""
    port = _free_port()
    tools = folder / ".venv/bin"
    tools.mkdir(parents=True)
    for name, text in {"djinn": DJINN, "python": '#!/usr/bin/env bash\nexec "$PYTHON" "$@"\n'}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "ROOT": str(ROOT),
        "MODEL": str(model),
        "PORT": str(port),
        "DJINN_STATE_DIR": str(folder / "state"),
        "DJINN_CACHE_DIR": str(folder / "cache"),
    }
    (folder / "script").write_text(script(page.read_text("utf-8"), port))
    shell = subprocess.Popen(
        ["bash", "script"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=timeout_s)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert shell.returncode == 0, printed
    return printed


def script(page: str, port: int) -> str:
    """The commands and the Python of a page as one script."""
    blocks = (_python(text) if language == "python" else _shell(text) for language, text in BLOCK.findall(page))
    return START + "\n".join(blocks).replace(":8000", f":{port}")


def _python(text: str) -> str:
    return f"\"$PYTHON\" -W error - <<'PY'\n{text}PY\n"


def _shell(text: str) -> str:
    text = text.replace("\\\n", " ").replace(f"{NOT_RUN}\n", "").replace("--target vllm", "--target djinn+none")
    text = SERVES.sub(r"serve \1", text).replace("--weights-device 30MiB", "--weights-device 600KiB")
    for experiment, options in SMALLER.items():
        text = re.sub(rf"^(.* -m loadgen {experiment} .*)$", rf"\1 {options}", text, flags=re.MULTILINE)
    return re.sub(rf"^(.* -m loadgen {MAY_MISS} .*)$", r"\1 || [ $? = 1 ]", text, flags=re.MULTILINE)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port

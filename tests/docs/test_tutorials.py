"""The commands of the pages: a test runs each, or the page says why none can; some are followed to their end.

One shell runs all of such a page, in its order. The model has as many layers as SmolLM2-135M but is tiny, servers
listen on another port, and experiments are small."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pytest

from app.cli import _parser
from app.gpu.kernels.cpu.compile import kernel_folder
from docs.site.pages import ROOT
from loadgen.cli import make_parser
from tests.cluster.pair import free_port
from tests.docs.blocks import FOLLOWED, Block, blocks_of, is_run, pages
from tests.openai.reference import save_tiny_model

BLOCKS = [block for page in pages() for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language == "bash"]
FENCE = re.compile(r"^ *```(?:bash|sh|shell|console|python|py)\b", re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
MEASURES = re.compile(r"\.venv/bin/python -m (benchmarks[\w.]*)(.*)")


def lines(blocks: list[Block]) -> list[str]:
    """Their commands, whole and without comments."""
    text = "\n".join(block.text.replace("\\\n", " ") for block in blocks)
    return [re.sub(r"\s#.*", "", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", pages())
def test_every_block_is_run_or_says_why_not_and_none_is_passed_over(page: str) -> None:
    mute = [block.text for block in blocks_of(page) if block.reason is None and not is_run(block)]
    assert mute == [], "run it, as tests/docs/blocks.py tells, or write `<!-- not run: WHY -->` above it"
    text = (ROOT / page).read_text("utf-8")
    assert len(FENCE.findall(text)) == len(list(blocks_of(page)))
    assert text.count("<!-- not run: ") + text.count("<!-- run by ") == sum(
        not block.is_free and f"{block.reason or block.test} -->\n\n```" in text for block in blocks_of(page)
    )


def test_every_target_of_make_exists() -> None:
    named = {found[1] for line in lines(SHELL) if (found := re.match(r"(?:\w+=\S+ )*make ([a-z-]+)", line))}
    assert len(named) > 15
    assert named - TARGETS == set()


def test_every_command_line_of_the_load_generator_is_one() -> None:
    found = [line.partition(" -m loadgen ")[2] for line in lines(SHELL) if " -m loadgen " in line]
    assert len(found) > 20
    for arguments in found:
        make_parser().parse_args(shlex.split(arguments))


def test_every_command_line_of_djinn_is_one() -> None:
    found = [line.partition(".venv/bin/djinn ")[2] for line in lines(SHELL) if line.startswith(".venv/bin/djinn ")]
    assert len(found) > 15
    for arguments in found:
        words = shlex.split(re.split(r"[|>]", arguments)[0], comments=True)
        if words != ["--version"]:
            _parser().parse_args(words)


HELP = """
import contextlib, io, json, runpy, sys
told = {}
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code
    told[module] = printed.getvalue()
json.dump(told, sys.stdout)
"""
"""A program that prints what modules say of their flags. Each in a process of its own would import PyTorch."""


@pytest.mark.long
def test_every_benchmark_has_the_flags_that_the_pages_give_it() -> None:
    flags: dict[str, set[str]] = {}
    for line in lines(SHELL):
        if found := MEASURES.match(line):
            flags.setdefault(found[1], set()).update(re.findall(r"--[a-z-]+", found[2]))
    assert len(flags) > 10
    done = subprocess.run([sys.executable, "-c", HELP, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for module, told in json.loads(done.stdout).items():
        assert flags[module] - set(re.findall(r"--[a-z-]+", told)) == set(), module


NAME = "smollm2-135m-instruct"
LAYERS = 30
MAKE_SERVE = f"serve .venv/bin/djinn serve --model {NAME}"
SERVES = re.compile(r"^(make serve|\.venv/bin/djinn serve .*)$", re.MULTILINE)
ALONE = [
    "docs/tutorials/agents-that-wait.md",
    "docs/tutorials/compare-with-vllm.md",
    "docs/tutorials/larger-than-memory.md",
    "docs/weight-ring.md",
]
"""Pages that start servers with flags. One server, as `make serve` starts it, is for all others."""
TOGETHER = [page for page in FOLLOWED if page not in ALONE]
NOT_RUN = ".venv/bin/python -m loadgen peers install vllm"
LATE = "--agents 3 --turns 2"
LOAD = "--system-tokens 8 --context 48 --resume-tokens 16 --completion-tokens 4 --think 0.2:0.3"
STARTS = "--model $MODEL --dtype float32 --kv 4x256"
SMALLER = {
    "density": f"{STARTS} --rate 10 {LATE} {LOAD} --output runs",
    "whitebox": "--sequences 1 --tokens 4 --others 1 --pause-seconds 0.5 --layers 7 --output runs || [ $? = 1 ]",
}
"""What takes the place of an experiment's options after its targets. A tiny model may miss a target: status 1."""
ASSIGNED = re.compile(r"(?:^|; )(?:for )?([A-Z]+)(?:=| in )", re.MULTILINE)
START = """
set -eu -o pipefail
SERVER= RUNS= BEGINS=
stop() { [ -z "$SERVER" ] || { kill "$SERVER"; wait "$SERVER" || true; SERVER=; }; }
trap stop EXIT
page() {
    echo "== $1"
    BEGINS=$RUNS
}
serve() {  # a page may begin with the server of the one before
    if [ "$*" = "$BEGINS" ]; then BEGINS=; return; fi
    stop
    "$@" &
    SERVER=$! RUNS=$*
    until curl -sf http://127.0.0.1:$PORT/ready > ready.json; do kill -0 "$SERVER"; sleep 0.1; done
}
make() {
    grep -q "^$1: " "$ROOT/Makefile"
}
once() {  # what another page runs too is run for the first of them
    local said; said=said-$(cksum <<< "$*" | tr ' ' -)
    [ -e "$said" ] || "$@" > "$said"
    cat "$said"
}
"""
DJINN = f"""#!/usr/bin/env bash
case "$1" in
    models) "$PYTHON" -m app models list | grep -q "$3" ;;  # known by name: no test downloads it here
    serve) exec "$PYTHON" -m app "$@" --model "$MODEL" --served-model-name {NAME} --port "$PORT" ;;
    backup | --version) "$PYTHON" -m app "$@" ;;
    doctor) "$PYTHON" -m app "$@" || [ $? = 1 ] ;;  # an error of this machine
    *) exit 2 ;;
esac
"""


def follow(commands: str, folder: Path, model: Path, timeout_s: float) -> str:
    """Run a script in an empty `folder`; returns what it printed. If a command fails, an `AssertionError` has that."""
    port = free_port()
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
        "HOME": str(folder),
        "DJINN_STATE_DIR": str(folder / ".local/state/djinn"),
        "DJINN_CACHE_DIR": str(folder / "cache"),
    }
    (folder / "cache").mkdir()
    (folder / "cache/kernels").symlink_to(kernel_folder())  # to recompile them takes half a minute
    (folder / "script").write_text(commands.replace(":8000", f":{port}"))
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


def script(page: str) -> str:
    """The page's commands; its variables are not there for the next page."""
    free = [block for block in blocks_of(page) if block.is_free]
    runs = [(language, [block.text for block in blocks]) for language, blocks in groupby(free, attrgetter("language"))]
    commands = [_python(texts) if language == "python" else "".join(map(_shell, texts)) for language, texts in runs]
    names = {name for block in free if block.language == "bash" for name in ASSIGNED.findall(block.text)}
    return "\n".join([f"page {page}", *commands, *(f"unset {name}" for name in sorted(names))])


def _python(texts: list[str]) -> str:
    """Each block begins anew, in one process: to import a client may take longer than what is done with it."""
    return f"\"$PYTHON\" -W error - <<'PY'\nfor text in {texts}:\n    exec(text, {{'__name__': '__main__'}})\nPY\n"


def _shell(text: str) -> str:
    text = text.replace("\\\n", " ").replace(f"{NOT_RUN}\n", "").replace("--target vllm", "--target djinn+none")
    text = text.replace("127.0.0.1:8001#MODEL", f"127.0.0.1:8000#{NAME}").replace("127.0.0.1:8001", "127.0.0.1:8000")
    text = SERVES.sub(r"serve \1", text).replace("serve make serve", MAKE_SERVE)
    text = re.sub(r"--weights-device \d+MiB", "--weights-device 600KiB", text)
    return "".join(f"{_smaller(line)}\n" for line in text.splitlines())


def _smaller(line: str) -> str:
    """The line with a smaller experiment, which takes seconds. It runs on the page's server, or starts another."""
    if line.startswith(".venv/bin/djinn doctor"):
        return f"once {line}"
    found = re.search(r"^(.* -m loadgen ([\w-]+)) ", line)
    if found is None or found[2] not in SMALLER:
        return line
    short = " ".join([found[1], *re.findall(r"--target \S+", line), SMALLER[found[2]]])
    return short if "=http" in line else f"once {short}"


TIMEOUT_S = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers have the numbers of SmolLM2-135M's."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, max_model_len=2048, layers=LAYERS)
    return folder


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("walk", [TOGETHER, ALONE], ids=["one server", "servers with flags"])
def test_every_command_of_a_page_works_in_its_order(walk: list[str], model: Path, tmp_path: Path) -> None:
    commands = [START, *([MAKE_SERVE] if walk is TOGETHER else []), *map(script, walk)]
    printed = follow("\n".join(commands), tmp_path, model, TIMEOUT_S)
    for page in walk:
        said = printed.partition(f"== {page}\n")[2].partition("\n== ")[0]
        assert [promise for promise in FOLLOWED[page] if promise not in said] == [], printed


def test_every_tutorial_is_followed_and_a_page_says_which_command_no_test_runs() -> None:
    assert {path.name for path in (ROOT / "docs/tutorials").glob("*.md")} <= {Path(page).name for page in FOLLOWED}
    for page in FOLLOWED:
        if any(NOT_RUN in block.text for block in blocks_of(page) if block.is_free):
            assert "No test runs this line" in (ROOT / page).read_text("utf-8")

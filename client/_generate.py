"""`python client/_generate.py` writes the blocking half of the client, `_sync`, from the half for asyncio, `_async`.

With `--check` it writes nothing, and fails if a file of `_sync` is not what it would write. It runs as a script: if the
blocking half is stale, the client may not import.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import unasync

ASYNC = Path(__file__).with_name("_async")
SYNC = ASYNC.with_name("_sync")
COMMAND = "python client/_generate.py"
HEADER = f"# Generated from client/_async by `{COMMAND}`: make changes there.\n"

CLASSES = (
    "ActivationsJob",
    "ActivationsJobs",
    "Breakpoint",
    "Checkpoint",
    "Client",
    "Dictionaries",
    "Djinn",
    "Lenses",
    "Probes",
    "Session",
    "Sessions",
    "Transport",
    "TurnStream",
    "Uploads",
    "Vectors",
)
NAMES = {
    **{f"Async{name}": name for name in CLASSES},
    "_async": "_sync",
    "asyncio": "time",  # of which only `sleep` is used
    "Place": "BlockingPlace",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "aclose": "close",
    "aiter_sse": "iter_sse",
    "aclosing": "nullcontext",  # only asyncio leaves a generator open when its reader stops
}
"""Names of the half for asyncio, and what they are in the blocking one, besides those that unasync knows."""


def generate() -> dict[Path, str]:
    """Every file of the blocking half, and its text. Raises `CalledProcessError` if Ruff finds fault with one."""
    sources = list(ASYNC.glob("*.py"))
    with TemporaryDirectory() as folder:
        rule = unasync.Rule(f"{ASYNC}/", f"{folder}/", additional_replacements=NAMES)
        unasync.unasync_files([str(source) for source in sources], [rule])
        return {SYNC / source.name: _tidy(source, Path(folder, source.name).read_text("utf-8")) for source in sources}


def _tidy(source: Path, text: str) -> str:
    """Shorter names sort elsewhere and let lines join, as plain `with` statements do.

    Ruff looks around the source to tell our modules from others': the blocking half may not be there yet.
    """
    text = HEADER + text
    for action in (["check", "--fix", "--quiet"], ["format"]):
        command = [sys.executable, "-m", "ruff", *action, "--stdin-filename", str(source), "-"]
        text = subprocess.run(command, input=text, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    return text


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the blocking client from that for asyncio.")
    parser.add_argument("--check", action="store_true", help="only say which files are stale; 1 if any is")
    check = parser.parse_args().check
    generated, present = generate(), {path: path.read_text("utf-8") for path in SYNC.glob("*.py")}
    stale = sorted(path for path in generated.keys() | present.keys() if generated.get(path) != present.get(path))
    if check:
        sys.exit("\n".join(f"{path} is stale: run {COMMAND}" for path in stale) or None)
    SYNC.mkdir(exist_ok=True)
    for path in present.keys() - generated.keys():
        path.unlink()
    for path, text in generated.items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

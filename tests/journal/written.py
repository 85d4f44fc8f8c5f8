"""Journals as each format was written. `python -m tests.journal.written` writes one of today's, once it has changed.

Each is what a server with the tiny model left when it had ended: two turns in `plain`, then forked into `fork` and
`idle`; a turn in `steered`, with a vector; a named session, and a kept response. Newer ones have more sessions.
"""

import sqlite3
import tempfile
import time
from array import array
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from safetensors.numpy import save

from app.domain.values import SessionId
from app.journal.migrations import FORMAT
from tests.durability.restarting import generate, open_session, serving
from tests.journal.building import FILE

HERE = Path(__file__).parent
PROMPTS = [[5, 6, 7], [9]]
"""Those of `plain`, for turns of 8 tokens."""


class Written(NamedTuple):
    """The sessions of a journal, in their order."""

    plain: SessionId
    fork: SessionId
    steered: SessionId
    named: SessionId
    of_response: SessionId


def formats() -> list[int]:
    return sorted(int(path.stem.removeprefix("format")) for path in HERE.glob("format*.sql"))


def put(folder: Path, number: int) -> Written:
    """Make `folder` a state folder with the journal of that format. Its sessions have just been used."""
    folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.executescript((HERE / f"format{number}.sql").read_text())
        connection.execute("UPDATE session SET used_at = ?", (time.time(),))
        ids = [SessionId(id) for (id,) in connection.execute("SELECT id FROM session ORDER BY id")]
    return Written(*ids[: len(Written._fields)])


def histories(folder: Path) -> dict[str, list[int]]:
    found: dict[str, array[int]] = {}
    with closing(sqlite3.connect(folder / FILE)) as connection:
        for session, ids in connection.execute("SELECT session, ids FROM tokens ORDER BY session, position"):
            found.setdefault(session, array("I")).frombytes(ids)
    return {session: list(tokens) for session, tokens in found.items()}


def contents(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute("PRAGMA user_version").fetchone()
        lines = list(connection.iterdump())
    return [*lines, f"PRAGMA user_version = {number};"]


def _use(http: httpx.Client) -> None:
    plain = open_session(http, metadata={"name": "plain"})
    for prompt in PROMPTS:
        generate(http, plain, prompt, 8)
    fork = http.post(f"/v1/sessions/{plain}/fork").raise_for_status().json()["id"]
    generate(http, fork, [11], 8)
    http.post(f"/v1/sessions/{plain}/phase", json={"phase": "idle"}).raise_for_status()
    calm = save({"calm": np.full(64, 0.5, np.float32)})
    http.post("/v1/vectors", params={"name": "calm"}, content=calm).raise_for_status()
    steered = open_session(http, residency="guaranteed")
    edit = {"op": "add", "factor": 4, "vector": "calm"}
    steering = {"layer": 0, "action": "edit", "edits": [edit]}
    http.post(f"/v1/sessions/{steered}/breakpoints", json=steering).raise_for_status()
    generate(http, steered, PROMPTS[0], 8)
    call = {"model": "tiny-llama", "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
    http.post("/v1/completions", json=call, headers={"X-Session-ID": "conversation 7"}).raise_for_status()
    asked = {"model": "tiny-llama", "input": "Hi", "max_output_tokens": 4}
    http.post("/v1/responses", json=asked).raise_for_status()
    file = http.get(f"/v1/sessions/{plain}/export").raise_for_status().content
    http.post("/v1/sessions/import", content=file).raise_for_status()


def main() -> None:
    """Write the journal of today's format beside the others."""
    with tempfile.TemporaryDirectory() as name:
        with serving(Path(name)) as http:
            _use(http)
        (HERE / f"format{FORMAT}.sql").write_text("\n".join(contents(Path(name, FILE))) + "\n")


if __name__ == "__main__":
    main()

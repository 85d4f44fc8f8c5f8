"""A reader who runs a notebook to its end finds what it promises, and what is shown before is of the same code."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("nbformat", reason="make setup-dev installs it")

import nbformat

from docs.notebooks.execution import FOLDER, SIGNATURE, digest, execute, names, read

TIMEOUT_S = 600
pytestmark = pytest.mark.dev


def found(name: str, *values: str) -> list[Any]:
    """Run the notebook; returns what these expressions are at its end."""
    ran = execute(name, then=f"import json\nprint(json.dumps([{', '.join(values)}]))")
    read_out: list[Any] = json.loads(ran.cells[-1].outputs[0].text)
    return read_out


@pytest.mark.parametrize("name", names())
def test_what_is_shown_is_of_the_code_as_it_is(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata[SIGNATURE] == digest(notebook), "run `make notebooks-write`"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@pytest.mark.parametrize("name", names())
def test_a_notebook_leaves_no_server_and_shows_nothing_of_the_machine_that_it_ran_on(name: str) -> None:
    code = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    assert code[-1].startswith("server.terminate()\nserver.wait()\n")
    assert re.findall(r"/(?:tmp|home|root|work|usr)/", (FOLDER / f"{name}.ipynb").read_text("utf-8")) == []


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(TIMEOUT_S)
def test_the_anatomy_is_what_the_server_accounts_for() -> None:
    counted, said, sizes, tokens, claimed, held, moves, same = found(
        "kv-cache-anatomy",
        *("token_bytes", "data.block_bytes / data.block_tokens", "sizes", "tokens", "claimed[-1]", "held[-1]"),
        *("{name: [size for size, _ in way] for name, way in moves.items()}", "same"),
    )
    assert counted == said
    assert sizes == [-(-count // 16) * 16 * counted for count in range(1, tokens + 1)]
    assert held < claimed / 2
    assert len(moves) == 4
    assert all(way == [length * counted for length in (1024, 512, 256, 128, 64)] for way in moves.values())
    assert same["as it is"] == same["zlib"] == 64


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(TIMEOUT_S)
def test_coming_back_computes_nothing_again_and_is_sooner_than_a_recompute() -> None:
    recomputed, moved, answers, ways, crossovers, longest = found(
        "resume-or-recompute", "recomputed", "moved", "answers", "WAYS", "crossovers", "LENGTHS[-1]"
    )
    assert set(recomputed) == {0}
    assert all(size >= tokens // 16 * 16 * 46_080 for tokens, size in moved)
    back = [[token for way, token in zip(ways, each, strict=True) if way != "recompute"] for each in answers]
    assert all(len(set(tokens)) == 1 for tokens in back)
    assert all(1 <= tokens < longest for tokens in crossovers.values())


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(TIMEOUT_S)
def test_a_push_changes_the_lens_above_it_and_the_reply() -> None:
    unpaused, replies, changes, pieces, guesses = found(
        "steering-through-the-lens",
        "unpaused",
        "replies",
        "changes.tolist()",
        "pieces",
        "[word(column[-1].token_ids[0][0]) for column in columns.values()]",
    )
    assert replies["plain"] == unpaused
    assert replies["steered"] != unpaused
    assert len(changes) == 10
    assert all(len(row) == len(pieces) and 0 <= min(row) < max(row) <= 1 for row in changes)
    assert changes[-1][-1] > 0.3
    assert guesses[2] != guesses[4]

"""A reader who runs a notebook to its end finds what it promises, and what is shown before is of the same code."""

import json
import re

import pytest

pytest.importorskip("nbformat", reason="make setup-dev installs it")

import nbformat

from docs.notebooks.execution import FOLDER, SIGNATURE, digest, execute, names, read

TIMEOUT_S = 600
pytestmark = pytest.mark.dev


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


SHOWN = {
    "a-direction-taken-away": (
        "right[LAYER] >= 0.75",
        "apart['the direction out'] < apart['as it is'] / 3 < apart['a random one out'] / 2",
        "answers['pushed to good'].min() > 0 > answers['pushed to bad'].max()",
        "len(set(texts.values())) == 3",
    ),
    "induction-heads": ("scores.max() > 0.5", "found['without the 6 best'] < found['without 6 random ones'] - 1"),
    "kv-cache-anatomy": (
        "token_bytes == data.block_bytes / data.block_tokens",
        "list(sizes) == [-(-count // 16) * 16 * token_bytes for count in range(1, tokens + 1)]",
        "held[-1] < claimed[-1] / 2",
        "len(moves) == 4",
        "all(way[:, 0].tolist() == [n * token_bytes for n in (1024, 512, 256, 128, 64)] for way in moves.values())",
        "same['as it is'] == same['zlib'] == 64",
    ),
    "resume-or-recompute": (
        "set(recomputed) == {0}",
        "all(size >= tokens // 16 * 16 * 46_080 for tokens, size in moved)",
        "all(len({token for way, token in zip(WAYS, each) if way != 'recompute'}) == 1 for each in answers)",
        "all(1 <= tokens < LENGTHS[-1] for tokens in crossovers.values())",
    ),
    "steering-through-the-lens": (
        "replies['plain'] == unpaused != replies['steered']",
        "len(changes) == 10 and changes[-1][-1] > 0.3",
        "all(len(row) == len(pieces) and 0 <= min(row) < max(row) <= 1 for row in changes.tolist())",
        "len({word(column[-1].token_ids[0][0]) for column in [*columns.values()][2:5:2]}) == 2",
    ),
    "which-head-moves-the-name": ("streams.clean > 1 > -1 > streams.corrupted", "heads.tables[0].best(1)[0][2] > 0.4"),
}
"""Those that compute for about a minute or longer are run by `make notebooks` and `make test-rare`."""
RARE = ("kv-cache-anatomy", "resume-or-recompute", "which-head-moves-the-name")


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.rare] * (name in RARE)) for name in SHOWN])
def test_a_notebook_shows_what_its_text_says(name: str) -> None:
    ran = execute(name, then=f"import json\nprint(json.dumps([bool(each) for each in ({', '.join(SHOWN[name])},)]))")
    assert json.loads(ran.cells[-1].outputs[0].text) == [True] * len(SHOWN[name])

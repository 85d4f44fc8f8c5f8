"""Conversations replayed with a tiny model, and the figures that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.domain.memory_map import DraftCounts
from benchmarks.drafts.figures import figures_of
from benchmarks.drafts.replay import Cost, Measured, Plan, Together, measure
from benchmarks.figures import figure_table

PLAN = Plan(conversations=3, turns=2, streams=2, context=300, tokens=20, temperature=0.0)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Conversations that repeat themselves."""
    path = tmp_path / "runs.jsonl"
    turn = [{"role": "user", "content": "again and again"}, {"role": "assistant", "content": "again and again"}]
    lines = [{"id": str(number), "messages": turn * (1 + number)} for number in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def own_threads() -> Iterator[None]:
    """The benchmark sets how many threads PyTorch has."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("own_threads")
def test_every_answer_is_the_same_with_drafts_and_without(runs: Path) -> None:
    measured = measure(Path("random:tiny-llama"), runs, PLAN, [0])
    assert [batch.turns for batch in measured.batches] == [2, 1, 1, 1]
    assert all(batch.equal == batch.turns for batch in measured.batches)
    assert sum(batch.tokens for batch in measured.batches) == 5 * 19


def test_figures_are_of_all_batches_together() -> None:
    batches = [
        Together(100, Cost(2, 4), Cost(1, 3), 2, 2, DraftCounts(60, 30)),
        Together(100, Cost(4, 4), Cost(3, 3), 1, 2, DraftCounts(40, 30)),
    ]
    rows = {row[0]: row[1:] for row in figure_table("", figures_of(PLAN, Measured(batches, 0.0))).rows}
    assert rows["With drafts / without, all batches"] == ("1.500 ×", "≥ 0.97 ×", "yes")
    assert rows["Accepted of the drafted tokens"][0] == "0.600 ×"
    assert rows["Tokens that cost no step of their own"][0] == "0.300 ×"
    assert rows["Answers that are the same"] == ("0.750 ×", "≥ 1 ×", "no")

"""The step after one that still runs, planned before that one's tokens are known. Pure planning: no tensors.

A device waits while the host reads tokens, accounts for them, tells of them and plans. So while all rows only decode,
the device is given the next step beside the one that runs. Each row takes its token where that step samples it (vLLM's
asynchronous scheduling, SGLang's overlap scheduler). A stop token or a failure may end a turn in between: then its row
has been computed in vain, and the result is passed over.
"""

from collections.abc import Sequence
from dataclasses import replace

from app.gpu.passes.segments import Row
from app.gpu.passes.ways import runs_plainly
from app.gpu.planning.scheduler import Scheduler
from app.gpu.sampling.requests import looks_back


def plan_overlapped(scheduler: Scheduler, rows: Sequence[Row], max_model_len: int) -> list[Row]:
    """Rows for the token after the one that each of `rows`, the step that runs, is about to sample; blocks to write to
    are reserved. Rows that sample their turn's last token have none.

    No rows if the step has to be planned when the tokens are known: one of the rows is not a plain one, would not be
    one next time, or is sampled from by way of its history; blocks are short; or there are drafts, which follow the
    tokens.
    """
    if scheduler.drafting.max_tokens:
        return []
    if not all(row.is_plain(scheduler.num_layers) and not row.scores_prompt for row in rows):
        return []
    going_on = [row for row in rows if not row.turn.is_full(len(row.sequence.tokens) + 1, max_model_len)]
    if not all(_is_predictable(row) for row in going_on):
        return []
    cache = scheduler.cache
    if sum(cache.missing(row.sequence, 2) for row in going_on) > cache.pool.available:
        return []
    for row in going_on:
        copies = cache.reserve(row.sequence, 2)
        assert not copies  # the step that runs writes to the last block, so nobody else holds it
    return [replace(row, first=row.end) for row in going_on]


def _is_predictable(row: Row) -> bool:
    """Whether the row after this one's next is known without its token."""
    return not looks_back(row.turn.sampling) and runs_plainly(row.sequence, row.turn, len(row.sequence.tokens))

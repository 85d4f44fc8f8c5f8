"""The step after one that still runs, planned before that one's tokens are known. Pure planning: no tensors.

A device waits while the host reads tokens, accounts for them, tells of them and plans. So while all rows only decode,
the device is given the next step beside the one that runs. Each row takes its token where that step samples it (vLLM's
asynchronous scheduling, SGLang's overlap scheduler). A stop token or a failure may end a turn in between: then its row
has been computed in vain, and the result is passed over.
"""

from collections.abc import Sequence

from app.gpu.kv_tiers.cache import KVCache
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
    following = list[Row]()
    growing = list[Row]()
    for row in rows:
        sequence, turn, next_ = row.sequence, row.turn, row.first + row.length
        if row.first >= sequence.plain_to and (row.scores_prompt or not row.is_plain(scheduler.num_layers)):
            return []
        if turn.is_full(len(sequence.tokens) + 1, max_model_len):
            continue
        if looks_back(turn.sampling):
            return []
        following.append(Row(sequence, turn, next_, 1, row.way, True, False))
        if next_ >= sequence.plain_to:  # once a block, unless something may happen to the session's rows
            growing.append(following[-1])
    return following if _grow(scheduler.cache, growing) else []


def _grow(cache: KVCache, rows: Sequence[Row]) -> bool:
    """Reserve blocks for rows that write past those of which it is known that their rows are plain. False, and nothing
    is reserved, if one is none or blocks are short.
    """
    if not all(row.first == row.sequence.plain_to or runs_plainly(row.sequence, row.turn, row.first) for row in rows):
        return False
    if sum(cache.missing(row.sequence, 2) for row in rows) > cache.pool.available:
        return False
    for row in rows:
        if not (row.first == row.sequence.plain_to and cache.extend_plain(row.sequence)):
            copies = cache.reserve(row.sequence, 2)
            assert not copies  # the step that runs writes to the last block, so nobody else holds it
    return True

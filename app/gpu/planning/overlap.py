"""The step after one that still runs, planned before that one's tokens are known. Pure planning: no tensors.

A device waits while the host reads tokens, accounts for them, tells of them and plans. So while all rows only decode,
the device is given the next step beside the one that runs. Each row takes its token where that step samples it (vLLM's
asynchronous scheduling, SGLang's overlap scheduler). Edits that are made whatever the token do not change that. A stop
token or a failure may end a turn in between: then its row has been computed in vain, and the result is passed over.
"""

from collections.abc import Sequence

from app.domain.breakpoint_work import STEP_WORK
from app.gpu.kv.cache import KVCache
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.step_plan import CannotPlan, StepPlan
from app.gpu.sampling.requests import looks_back
from app.gpu.state.paths import PassPlan, plan_ahead, work_of
from app.gpu.state.segments import Row


def plan_overlapped(scheduler: Scheduler, rows: Sequence[Row], max_model_len: int) -> list[Row]:
    """Rows for the token after the one that each of `rows`, the step that runs, is about to sample; blocks to write to
    are reserved. Rows that sample their turn's last token have none.

    No rows if the step has to be planned when the tokens are known: one of the rows is not of a single token, has a
    path next time that depends on the token, or is sampled from by way of its history; blocks are short; or there are
    drafts, which follow the tokens. Raises `CannotPlan` for an error at one turn, and any other as it is.
    """
    if scheduler.drafting.max_tokens:
        return []
    plan = StepPlan()
    try:
        return _follow(plan, scheduler, rows, max_model_len)
    except Exception as error:
        if plan.looking_at is None:
            raise
        raise CannotPlan(StepPlan(), plan.looking_at) from error


def _follow(plan: StepPlan, scheduler: Scheduler, rows: Sequence[Row], max_model_len: int) -> list[Row]:
    """The rows. `plan` tells which turn is looked at."""
    following = list[Row]()
    growing = list[Row]()
    work = 0
    for row in rows:
        sequence, turn, next_ = row.sequence, row.turn, row.first + row.length
        plan.looking_at = sequence
        if row.first >= sequence.plain_to and not _is_step_of_one(row):
            return []
        if turn.is_full(len(sequence.tokens) + 1, max_model_len):
            continue
        if looks_back(turn.sampling):
            return []
        path = row.path
        if next_ > sequence.plain_to:
            planned = _plan_next(row, scheduler.num_layers)
            if planned is None:
                return []
            path, work = planned, work + work_of(planned.reached)
        following.append(Row(sequence, turn, next_, 1, path, True, False))
        if next_ >= sequence.plain_to:  # once a block, unless something may happen to the session's rows
            growing.append(following[-1])
    plan.looking_at = None
    return following if work <= STEP_WORK and _grow(plan, scheduler.cache, growing) else []


def _is_step_of_one(row: Row) -> bool:
    """Whether the row's one token leads to the next, and the breakpoints that meet it stay."""
    return row.length == 1 and row.samples and not row.scores_prompt and not row.path.spent


def _plan_next(row: Row, num_layers: int) -> PassPlan | None:
    """The path of the token after the row's. None if it has to be known, or if edits are made to the row's own alone:
    where there are none yet, nobody looks whether they have led to numbers that are not finite.
    """
    path = plan_ahead(row.sequence, row.turn, row.first + 1, num_layers)
    return None if path is not None and row.path.new_edits and not path.new_edits else path


def _grow(plan: StepPlan, cache: KVCache, rows: Sequence[Row]) -> bool:
    """Reserve blocks for rows that write past those of which it is known that their rows are plain. False, and nothing
    is reserved, if blocks are short.
    """
    missing = 0
    for row in rows:
        plan.looking_at = row.sequence
        missing += cache.missing(row.sequence, 2)
    plan.looking_at = None
    if missing > cache.pool.available:
        return False
    for row in rows:
        plan.looking_at = row.sequence
        if not (row.first == row.sequence.plain_to and cache.extend_plain(row.sequence)):
            copies = cache.reserve(row.sequence, 2)
            assert not copies  # the step that runs writes to the last block, so no other session holds it
    return True

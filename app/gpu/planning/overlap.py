"""The step after one that still runs, planned before that one's tokens are known. Pure planning: no tensors.

A device waits while the host reads tokens, accounts for them, reports them and plans. So while all rows only decode,
the device gets the next step before the running one ends. Each row takes its token where that step samples it (vLLM's
asynchronous scheduling, SGLang's overlap scheduler). Edits that are made whatever the token do not change that. A stop
token or a failure may end a turn in between: then its row was computed in vain, and the result is skipped.
"""

from collections.abc import Sequence

from app.domain.breakpoint_work import STEP_WORK
from app.gpu.kv.cache import KVCache
from app.gpu.planning.queue import StepPlan
from app.gpu.planning.scheduler import Scheduler
from app.gpu.sampling import penalise
from app.gpu.state.paths import plan_ahead, work_of
from app.gpu.state.segments import Row


def plan_overlapped(scheduler: Scheduler, rows: Sequence[Row], max_model_len: int) -> StepPlan:
    """A plan of the token after the one that each of `rows`, the step that runs, is about to sample. Blocks to write to
    are reserved. Rows that sample their turn's last token have no next one.

    No rows if the step can only be planned when the tokens are known. That is so if a row is not of a single token, if
    its breakpoints or its sampling depend on the token, if blocks are short, or if there are drafts. An error at one
    turn is the plan's `failure`; any other is raised.
    """
    plan = StepPlan()
    if scheduler.drafting.max_tokens:
        return plan
    try:
        plan.rows = _follow(plan, scheduler, rows, max_model_len)
    except Exception as error:
        if plan.looking_at is None:
            raise
        plan.failure = plan.looking_at, error
    return plan


def _follow(plan: StepPlan, scheduler: Scheduler, rows: Sequence[Row], max_model_len: int) -> list[Row]:
    following, growing, work = list[Row](), list[Row](), 0
    for row in rows:
        sequence, turn, position, path = row.sequence, row.turn, row.first + row.length, row.path
        plan.looking_at = sequence
        if row.first >= sequence.fast_path_until:
            leads_on = row.length == 1 and row.samples and not row.scores_prompt
            if not leads_on or path.spent:  # a breakpoint that acts once does not meet the next token
                return []
        if turn.is_full(len(sequence.tokens) + 1, max_model_len):
            continue
        if turn.sampling.grammar is not None or penalise(turn.sampling):  # each token depends on the one before
            return []
        if position > sequence.fast_path_until:
            ahead = plan_ahead(sequence, turn, position, scheduler.num_layers)
            # Where edits are made to this token alone, nothing looks whether the next has finite numbers.
            if ahead is None or (path.new_edits and not ahead.new_edits):
                return []
            path, work = ahead, work + work_of(ahead.reached)
        following.append(Row(sequence, turn, position, 1, path, True, False))
        if position >= sequence.fast_path_until:  # once a block, unless something may happen to the session's rows
            growing.append(following[-1])
    plan.looking_at = None
    return following if work <= STEP_WORK and _grow(plan, scheduler.cache, growing) else []


def _grow(plan: StepPlan, cache: KVCache, rows: Sequence[Row]) -> bool:
    """Reserve blocks for rows that write past their fast path. False, and nothing is reserved, if blocks are short."""
    missing = 0
    for row in rows:
        plan.looking_at = row.sequence
        missing += cache.missing(row.sequence, 2)
    if missing > cache.pool.available:
        return False
    for row in rows:
        plan.looking_at = row.sequence
        if not (row.first == row.sequence.fast_path_until and cache.extend_plain(row.sequence)):
            copies = cache.reserve(row.sequence, 2)
            assert not copies  # the step that runs writes to the last block, so no other session holds it
    plan.looking_at = None
    return True

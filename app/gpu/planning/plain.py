"""Turns that decode plainly: rows of one token that run all layers, sample, and write to a block of their own.

Most rows of most steps are such. That a row is one is asked once a block, and noted in the sequence (`plain_to`).
"""

from app.gpu.kv.cache import KVCache
from app.gpu.planning.queue import ActiveTurn


def decodes_plainly(active: ActiveTurn, cache: KVCache) -> bool:
    """Whether the turn's next rows are plain up to the end of the block that they write to."""
    if active.sequence.watched or active.scores_prompt or active.turn.stop.max_tokens == 0:
        return False
    return cache.is_ready(active.sequence)


def note_plain(active: ActiveTurn, cache: KVCache) -> None:
    """Note it if the turn decodes plainly."""
    sequence, size = active.sequence, cache.pool.block_size
    if decodes_plainly(active, cache):
        sequence.plain_to = (sequence.computed // size + 1) * size

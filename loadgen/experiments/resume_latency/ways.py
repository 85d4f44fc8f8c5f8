"""Two of the ways back to where a session was: to compute it again, and to have the server bring it back."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from client import AsyncSession, AsyncTurnStream, Turn
from loadgen.errors import NotAsMeant
from loadgen.experiments.resume_latency.away import Passers, fetch
from loadgen.experiments.resume_latency.plan import Cell, Sample, Way
from loadgen.load.prompts import TokenIds
from loadgen.load.stopwatch import Stopwatch
from loadgen.targets.subject import Subject, greedy

DISPATCH = "djinn_resume_dispatch_seconds"
CHECKPOINT = "djinn_checkpoint_restore_seconds"
PAUSE_TIMEOUT_S = 3600.0
"""Longer than a sample takes: only the experiment ends its pauses."""

WHOLE = 0.8
"""Share of a session's KV that must have been copied for it to count as away: a block may be shared with others, and
`computed_share` counts tokens where blocks move.
"""


async def pause_at(session: AsyncSession, prompt: TokenIds, layer: int) -> Turn:
    """Send the history and wait until its last position stands after `layer`. Raises `NotAsMeant`, `DjinnError`.

    Parts of the history before the last one, if the server computes it in parts, run through all layers.
    """
    turn = await session.generate(**greedy(prompt, 1))
    if turn.checkpoint is None or turn.checkpoint.layer != layer:
        raise NotAsMeant(f"the turn did not pause after layer {layer}")
    _check_uncached(turn)
    return turn


async def arm(session: AsyncSession, prompt: TokenIds, layer: int) -> None:
    """Have the session pause after `layer` in the pass over the prompt's last position."""
    await session.break_at(layer=layer, when_pass="prefill", position=len(prompt) - 1, timeout_s=PAUSE_TIMEOUT_S)


async def recompute(subject: Subject, cell: Cell, repeat: int, prompts: tuple[TokenIds, TokenIds]) -> Sample:
    """Send a fresh session a whole history, up to the layer; then another one, to its next token, without a pause.

    Two histories, so that neither finds anything of the other in the prefix cache. The opening of the sessions and the
    arming of the breakpoint are not on the clock. Raises `NotAsMeant`, `DjinnError`.
    """
    async with subject.session() as session:
        await arm(session, prompts[0], cell.layer)
        watch = Stopwatch()
        await pause_at(session, prompts[0], cell.layer)
        standing_s = watch.lap()
        kv_bytes = (await session.refresh()).kv.device_bytes
    async with subject.session() as session:
        watch = Stopwatch()
        async with session.stream(**greedy(prompts[1], 1)) as stream:
            token_s, turn = await _first_token(stream, watch)
        _check_uncached(turn)
    return Sample(Way.RECOMPUTE, cell, repeat, standing_s, token_s, turn.token_ids[0], kv_bytes)


async def call_back(subject: Subject, passers: Passers, cell: Cell, repeat: int, prompt: TokenIds) -> Sample:
    """Pause a session, and have it come back from the host tier twice: once by `ready` to where it was, and once by
    `resume` to its next token. Raises `NotAsMeant`, `DjinnError`.
    """
    async with subject.session() as session:
        await arm(session, prompt, cell.layer)
        paused = await pause_at(session, prompt, cell.layer)
        kv_bytes = (await session.refresh()).kv.device_bytes
        computed = computed_share(paused, subject.num_layers)
        await passers.send_away(session)
        back = session.info.usage.bytes_in
        standing_s = await fetch(session)
        _check_copied(session, back, computed * kv_bytes)
        await passers.send_away(session)
        back, before = session.info.usage.bytes_in, await _server_clock(subject)
        watch = Stopwatch()
        async with session.resume_stream(until="end") as stream:
            token_s, turn = await _first_token(stream, watch)
        dispatch_s, copy_s, checkpoint_s = _differences(before, await _server_clock(subject))
        await session.refresh()
        _check_copied(session, back, computed * kv_bytes)
    if checkpoint_s is None:
        raise NotAsMeant("the server does not tell how long the residual stream took to come back")
    standing_s += checkpoint_s
    token_id = turn.token_ids[0]
    return Sample(Way.DJINN, cell, repeat, standing_s, token_s, token_id, kv_bytes, dispatch_s, copy_s, checkpoint_s)


Clock = tuple[float | None, ...]


async def _server_clock(subject: Subject) -> Clock:
    """Seconds since the server started, by its own clocks, of dispatching resumes, of copies of KV to the device, and
    of bringing back residual streams; None where it does not tell. Raises `DjinnError`.
    """
    metrics, memory = await subject.metrics(), await subject.memory()
    return _sum(metrics, DISPATCH), memory.moves["in"].seconds, _sum(metrics, CHECKPOINT)


def _sum(metrics: str, name: str) -> float | None:
    """The sum of histogram `name` in the text of `/metrics`; None if there is no such one."""
    families = text_string_to_metric_families(metrics)
    sums = [each.value for family in families for each in family.samples if each.name == f"{name}_sum"]
    return sum(sums) if sums else None


def _differences(before: Clock, after: Clock) -> Clock:
    """What was added between two readings; exact while no other client uses the server."""
    return tuple(None if old is None or new is None else new - old for old, new in zip(before, after, strict=True))


async def _first_token(stream: AsyncTurnStream, watch: Stopwatch) -> tuple[float, Turn]:
    """How long the turn's only token took, and the turn."""
    seconds = None
    async for event in stream:
        if event.token_ids:
            seconds = watch.lap()
    if seconds is None:
        raise NotAsMeant("the turn ended without a token")
    return seconds, stream.turn


def _check_uncached(turn: Turn) -> None:
    if turn.usage.cached_tokens:
        raise NotAsMeant(f"{turn.usage.cached_tokens} tokens of the history were in the prefix cache")


def computed_share(paused: Turn, num_layers: int) -> float:
    """Share of a session's KV that has been computed where it is paused: its last pass has run some of the layers."""
    place = paused.checkpoint
    assert place is not None
    above = num_layers - 1 - place.layer
    return 1 - (place.end - place.first) / place.end * above / num_layers


def _check_copied(session: AsyncSession, before: int, computed_bytes: float) -> None:
    usage = session.info.usage
    if usage.bytes_in - before < WHOLE * computed_bytes:
        raise NotAsMeant(f"{usage.bytes_in - before} of {computed_bytes:.0f} bytes came back: the device had the rest")
    if usage.tokens_recomputed:
        raise NotAsMeant(f"the server computed {usage.tokens_recomputed} tokens again")

"""What experiments share: prompts, the points of the model that they are about, and reading what a prompt has there.

A prompt is computed in a session that lives as long, and breakpoints capture what is wanted. The engine counts all such
sessions as those of batches are counted, so other turns come first.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from itertools import islice
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from app.domain.activations import MAX_CAPTURE_BYTES, Captures
from app.domain.breakpoints import Action, Breakpoint, TensorParts, TopFeatures, When
from app.domain.errors import ActivationsFull, Draining, FieldOutOfRange, TurnCancelled
from app.domain.points import ABOUT, ORDER, WHOLE, Axis, Point
from app.domain.positions import Runs, clip_runs, count
from app.domain.values import FinishReason, ModelInfo, SamplingParams, StopRule
from app.messages import Above, TurnFinished
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule
from app.text.tokenizer import TextLimit, Tokens
from app.wire.base import MAX_COUNT, LongList, TextOrList, TokenId, check_token_ids
from app.wire.points import layers_of, named_point, shape_at

PLACES_AT_ONCE = 128
"""Layers, summed over points, that one pass captures: each is an operation at every position."""
PART_BYTES = MAX_CAPTURE_BYTES // 2
"""The most bytes that one turn captures. A longer prompt is computed in several turns of equal length: each step reads
all weights, so a short last turn would cost almost as much as a long one.
"""
NUMBER_BYTES = {"float32": 4}
"""Of a number of an activation, by data type; 2 for any other."""

PromptField = TextOrList[str, Annotated[LongList[TokenId], Field(min_length=1)]]
PointName = Annotated[str, Field(min_length=1, max_length=64)]
PointsField = Annotated[LongList[PointName], Field(min_length=1, max_length=64)]
LayersField = Annotated[LongList[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(min_length=1)]

Sites = dict[Point, tuple[int, ...]]
"""The layers of each point that an experiment is about, both in the order of a pass."""
Found = dict[tuple[Point, int], TensorParts]
"""What was captured, by point and layer: `[positions, ...]`."""


def encode(prompt: str | Sequence[int], tokens: Tokens, info: ModelInfo, *, param: str) -> list[int]:
    """The token ids of a prompt. Raises `FieldOutOfRange`, `ContextTooLong`, `MalformedRequest`."""
    if isinstance(prompt, str):
        found = tokens.encode(prompt, add_special_tokens=True, limit=TextLimit(param, info.max_model_len))
    else:
        check_token_ids(prompt, info.vocab_size, param=param)
        found = list(prompt)
    if not found:
        raise FieldOutOfRange(f"{param}: at least 1 token", param=param)
    return found


def find_sites(names: Iterable[str], layers: Sequence[int] | None, info: ModelInfo) -> Sites:
    """The layers of each of the points named `names`: those of a name such as `blocks.3.attn.hook_q`, else `layers`,
    else all that have the point. What is named twice counts once. Raises `FieldOutOfRange` for what the model lacks.
    """
    chosen = defaultdict[Point, set[int]](set)
    for layer in layers or ():
        shape_at(info, Point.RESID_POST, layer, param="layers")
    for index, name in enumerate(names):
        param = f"points.{index}"
        point, at = named_point(info, name, param=param)
        if ABOUT[point].axis is Axis.STATE:
            raise FieldOutOfRange(f"{param}: {point} is of a pass, not of its positions", param=param)
        wanted = [at] if at is not None else layers if layers and point not in WHOLE else layers_of(info, point)
        for layer in wanted:
            shape_at(info, point, layer, param=param)
        chosen[point].update(wanted)
    return {point: tuple(sorted(chosen[point])) for point in sorted(chosen, key=ORDER.__getitem__)}


def position_bytes(sites: Sites, info: ModelInfo, keys: int) -> int:
    """Bytes of one position at all sites; a pattern has a number for each of `keys` and head."""
    numbers = 0
    for point, layers in sites.items():
        shapes = [info.points[point][layer] for layer in layers]
        width = sum(shape.width for shape in shapes if shape is not None)
        numbers += width * (keys if ABOUT[point].axis is Axis.KEYS else 1)
    return numbers * NUMBER_BYTES.get(info.dtype, 2)


def passes(sites: Sites) -> Iterable[Sites]:
    """The same sites, as many at a time as one pass captures."""
    left = iter([(point, layer) for point, layers in sites.items() for layer in layers])
    while some := list(islice(left, PLACES_AT_ONCE)):
        part = defaultdict[Point, tuple[int, ...]](tuple)
        for point, layer in some:
            part[point] += (layer,)
        yield dict(part)


def capturing(sites: Sites, among: Runs, features: TopFeatures | None = None) -> list[Breakpoint]:
    """Breakpoints that capture these positions at all sites, or there the most active features."""
    return [
        Breakpoint(f"read_{point}", layers, Action.CAPTURE, When(among=among), point=point, features=features)
        for point, layers in sites.items()
    ]


async def compute(
    registry: SessionRegistry, session: Session, token_ids: Sequence[int], *, param: str, above: Above | None = None
) -> None:
    """Append the tokens to the session's history, compute them, and generate nothing; with `above` compute the end of
    the history once more, from that layer on. Raises what a turn does.
    """
    sampling, stop = SamplingParams(seed=0), StopRule(max_tokens=0)
    asked = TurnRequest(token_ids, sampling, stop, TextRule(), pausable=False, param=param, above=above)
    async with AsyncExitStack() as cleanup:
        end = await registry.turns.start(session, asked, cleanup).read()
    if isinstance(end, TurnFinished) and end.reason is FinishReason.CANCELLED:
        if registry.table.draining:
            raise Draining("the server is shutting down; the computation was cancelled")
        raise TurnCancelled("computation")


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once. Raises the first error, and then ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def read_prompt(
    registry: SessionRegistry,
    owner: str | None,
    token_ids: Sequence[int],
    sites: Sites,
    among: Runs = (),
    features: TopFeatures | None = None,
    *,
    param: str = "prompt",
    place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> Found:
    """What the prompt has at `sites`, at the positions `among` (none: at all): `[positions, width]`, and of a pattern
    `[positions, heads, keys]` with 0 for keys behind the query; or of `features` the activations, and then the numbers,
    `[positions, 2 * top_k]`. The caller may be cancelled at any moment. Each turn has a `place`; what it has captured
    is read when another may have that already.

    Raises `ActivationsFull` where `max_activation_bytes` has no room now, and what turns and sessions do.
    """
    info = registry.executor.engine.info
    end = among[-1].end if among else len(token_ids)
    registry.turns.room(len(token_ids), 0, param=param)
    found: Found = {}
    for some in passes(sites):
        parts = -(-end // max(1, PART_BYTES // position_bytes(some, info, end)))
        part = -(-end // parts)
        seen = defaultdict[tuple[Point, int], list[TensorParts]](list)
        async with registry.ephemeral(owner, unseen=True) as session:
            registry.whitebox.arm_now(session, *capturing(some, among, features))
            for first in range(0, end, part):
                last = min(end, first + part)
                async with place():
                    await compute(registry, session, token_ids[first:last], param=param)
                wanted = count(clip_runs(among, first, last)) if among else last - first
                captures = await registry.whitebox.captures(session)
                _check(captures, wanted * sum(map(len, some.values())))
                for each in captures.records:
                    seen[each.point, each.layer].append(each.tensor)
                if last < end:
                    await registry.whitebox.clear_captures(session)
        found |= {site: _join(site[0], parts, end) for site, parts in seen.items()}
    return found


def _check(captures: Captures, rows: int) -> None:
    if captures.dropped or sum(each.tensor.shape[0] for each in captures.records) < rows:
        raise ActivationsFull("captures have no room in max_activation_bytes now", retry_after_s=1)


def _join(point: Point, parts: Sequence[TensorParts], keys: int) -> TensorParts:
    """What was captured of one prompt in several passes, one behind the other."""
    if ABOUT[point].axis is Axis.KEYS:
        parts = [_padded(each, keys) for each in parts]
    rows, rest = sum(each.shape[0] for each in parts), parts[0].shape[1:]
    return TensorParts(parts[0].dtype, (rows, *rest), tuple(part for each in parts for part in each.parts))


def _padded(part: TensorParts, keys: int) -> TensorParts:
    """A pattern with zeros for keys that its pass did not have."""
    rows, heads, width = part.shape
    if width == keys:
        return part
    data = part.joined().data
    size = len(data) // (rows * heads * width)
    padded = np.zeros((rows, heads, keys * size), np.uint8)
    padded[..., : width * size] = np.frombuffer(data, np.uint8).reshape(rows, heads, width * size)
    return TensorParts(part.dtype, (rows, heads, keys), (padded.tobytes(),))

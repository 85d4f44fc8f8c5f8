"""`/v1/embeddings`: prompts that generate nothing, and the vector that the model makes of each."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from app.domain.activations import MAX_CAPTURE_BYTES
from app.domain.breakpoints import Action, Breakpoint, When
from app.domain.errors import Draining, FieldOutOfRange, TurnCancelled
from app.domain.values import Adapter, FinishReason, ModelInfo, SamplingParams, StopRule
from app.messages import TurnFinished
from app.openai.embeddings import EmbeddingBody, EmbeddingList, finished, write_embeddings
from app.routers.api_calls import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, as_model, openai_errors
from app.routers.dependencies import OwnerDep, Services, ServicesDep
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule
from app.text.tokenizer import TextLimit, Tokens
from app.web.bodies import LargeAnswer
from app.web.sse import unless_disconnected
from app.wire.base import check_token_ids

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

AT_ONCE = 8
"""Inputs of one call that are computed at a time."""
NUMBER_BYTES = {"float32": 4}
"""Of each number of the residual stream, by data type; 2 for any other."""


@router.post(
    "/v1/embeddings",
    operation_id="createEmbedding",
    response_model=EmbeddingList,
    responses={**openai_errors(404, 503), 200: {"headers": IGNORED_DESCRIPTION}},
)
async def create_embedding(
    request: Request, body: EmbeddingBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep
) -> Response:
    """A vector for each input. A client that disconnects cancels what is left."""
    ignored.read(body)
    found = services.sessions.adapters.get(body.model)
    info = services.info if found is None else as_model(services.info, found)
    adapter = None if found is None else found.adapter
    for field, given, most in (
        ("layer", body.layer, info.num_layers - 1),
        ("dimensions", body.dimensions, info.hidden_size),
    ):
        if given is not None and given > most:
            raise FieldOutOfRange(f"{field} must be at most {most}", param=field)
    inputs = await services.side_work.run(owner, _encode, body, services.tokens, info)
    vectors = await unless_disconnected(request, _embed_all(services, owner, body, inputs, adapter))
    answer = await asyncio.to_thread(write_embeddings, vectors, body, info, sum(map(len, inputs)))
    return LargeAnswer(answer, media_type="application/json")


def _encode(body: EmbeddingBody, tokens: Tokens, info: ModelInfo) -> list[Sequence[int]]:
    """The token ids of each input. Raises `FieldOutOfRange`, `ContextTooLong`."""
    inputs: Sequence[str | list[int]] = body.inputs
    encoded = list[Sequence[int]]()
    most = MAX_CAPTURE_BYTES // (info.hidden_size * NUMBER_BYTES.get(info.dtype, 2))
    for index, given in enumerate(inputs):
        field = "input" if len(inputs) == 1 else f"input.{index}"
        if isinstance(given, str):
            token_ids = tokens.encode(given, add_special_tokens=True, limit=TextLimit(field, info.max_model_len))
        else:
            check_token_ids(given, info.vocab_size, param=field)
            token_ids = given
        if not token_ids:
            raise FieldOutOfRange(f"{field}: at least 1 token", param=field)
        if body.pooling == "mean" and len(token_ids) > most:
            raise FieldOutOfRange(f"{field}: the mean is of at most {most} tokens, not {len(token_ids)}", param=field)
        encoded.append(token_ids)
    return encoded


async def _embed_all(
    services: Services,
    owner: str | None,
    body: EmbeddingBody,
    inputs: Sequence[Sequence[int]],
    adapter: Adapter | None,
) -> list[NDArray[np.float32]]:
    """The vector of each input, a few at a time. Raises the first error, and then computes no more."""
    left = list(reversed(list(enumerate(inputs))))
    vectors: dict[int, NDArray[np.float32]] = {}

    async def work() -> None:
        while left:
            index, token_ids = left.pop()
            field = "input" if len(inputs) == 1 else f"input.{index}"
            vectors[index] = await _embed(services, owner, body, token_ids, field, adapter)

    limits = services.tenancy.quotas.limits(owner)
    most = min(limits.turns_at_once or AT_ONCE, AT_ONCE, len(inputs))
    most = max(1, services.sessions.table.free(owner, most))  # no session closes for a second one at a time
    workers = [asyncio.create_task(work()) for _ in range(most)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
    return [vectors[index] for index in range(len(inputs))]


async def _embed(
    services: Services,
    owner: str | None,
    body: EmbeddingBody,
    token_ids: Sequence[int],
    field: str,
    adapter: Adapter | None,
) -> NDArray[np.float32]:
    """Compute one input in a session that lives as long, and pool what a capture has taken of it."""
    sessions, last = services.sessions, len(token_ids) - 1
    sessions.turns.room(len(token_ids), 0, param=field)
    metadata = {} if body.user is None else {"user": body.user}
    opened = sessions.ephemeral(owner, metadata=metadata, unseen=True, adapter=adapter)
    async with opened as session, AsyncExitStack() as cleanup:
        layer = services.info.num_layers - 1 if body.layer is None else body.layer
        when = When(position=last if body.pooling == "last" else None)
        await sessions.whitebox.arm(session, Breakpoint("embedding", (layer,), Action.CAPTURE, when))
        nothing, whole = StopRule(max_tokens=0), SamplingParams(seed=0)
        asked = TurnRequest(token_ids, whole, nothing, TextRule(), replace=True, pausable=False, param=field)
        end = await sessions.turns.start(session, asked, cleanup).read()
        if isinstance(end, TurnFinished) and end.reason is FinishReason.CANCELLED:
            if sessions.table.draining:
                raise Draining("the server is shutting down; the turn was cancelled")
            raise TurnCancelled
        return finished(await sessions.whitebox.pool_captures(session, normed=body.layer is None), body)

"""`/v1/embeddings`: prompts that generate nothing, and the vector that the model makes of each."""

import asyncio
import base64
from collections.abc import Sequence
from itertools import starmap
from typing import Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import Field

from app.domain.activations import MAX_CAPTURE_BYTES
from app.domain.breakpoints import Action, Breakpoint, TensorData, When
from app.domain.errors import EngineError, FieldOutOfRange
from app.domain.values import Adapter, ModelInfo
from app.experiments.reading import NUMBER_BYTES, compute, encode, together
from app.openai.completions import Prompt, prompts_of
from app.routers.api_calls import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, as_model, openai_errors
from app.routers.dependencies import OwnerDep, Services, ServicesDep
from app.text.tokenizer import Tokens
from app.web.bodies import LargeAnswer
from app.web.sse import unless_disconnected
from app.wire.base import fixed, shape
from app.wire.calls import OpenBody

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

AT_ONCE = 8
"""Inputs of one call that are computed at a time."""


class EmbeddingBody(OpenBody):
    """Texts or token ids, each of which becomes one vector.

    `pooling`, `layer` and `normalize` are additions: which positions make the vector, where in the model it is read,
    and whether its length is 1.
    """

    model: str = Field(description="the served model's name, as /v1/models gives it")
    input: Prompt = Field(description="one input or several, each a text or token ids")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="numbers, or base64 of them as float32, little endian"
    )
    dimensions: int | None = Field(
        None, ge=1, description="keep so many of the first numbers, before they are normalized (default: all)"
    )
    pooling: Literal["last", "mean"] = Field("last", description="the last token's vector, or the mean of all tokens'")
    layer: int | None = Field(
        None, ge=0, description="read the residual stream after this layer (default: after the final norm)"
    )
    normalize: bool = Field(True, description="scale each vector to the length 1")
    user: str | None = Field(None, max_length=512, description="the caller's name for its end user")

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a list, whichever form they came in."""
        return prompts_of(self.input)

    def field_of(self, index: int) -> str:
        """The field that an input came in."""
        return "input" if len(self.inputs) == 1 else f"input.{index}"


Embedding = shape(
    "Embedding",
    "The vector of one input; with `encoding_format` base64 it is a text.",
    {"object": fixed("embedding"), "index": int, "embedding": list[float] | str},
)
EmbeddingUsage = shape(
    "EmbeddingUsage", "Tokens of all inputs, counted twice.", {"prompt_tokens": int, "total_tokens": int}
)
EmbeddingList = shape(
    "EmbeddingList",
    "The vectors in the order of their inputs.",
    {"object": fixed("list"), "data": [Embedding], "model": str, "usage": EmbeddingUsage},
)


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


def _encode(body: EmbeddingBody, tokens: Tokens, info: ModelInfo) -> list[list[int]]:
    """The token ids of each input. Raises `FieldOutOfRange`, `ContextTooLong`."""
    encoded, inputs = list[list[int]](), list[str | list[int]](body.inputs)
    most = MAX_CAPTURE_BYTES // (info.hidden_size * NUMBER_BYTES.get(info.dtype, 2))
    for index, given in enumerate(inputs):
        field = body.field_of(index)
        token_ids = encode(given, tokens, info, param=field)
        if body.pooling == "mean" and len(token_ids) > most:
            raise FieldOutOfRange.at(field, f"the mean is of at most {most} tokens, not {len(token_ids)}")
        encoded.append(token_ids)
    return encoded


async def _embed_all(
    services: Services, owner: str | None, body: EmbeddingBody, inputs: Sequence[list[int]], adapter: Adapter | None
) -> list[NDArray[np.float32]]:
    """The vector of each input, a few at a time. Raises the first error, and then computes no more."""
    vectors: dict[int, NDArray[np.float32]] = {}
    limits = services.tenancy.quotas.limits(owner)
    most = min(limits.turns_at_once or AT_ONCE, AT_ONCE, len(inputs))
    slots = asyncio.Semaphore(max(1, services.sessions.table.free(owner, most)))  # none closes for a second one

    async def embed(index: int, token_ids: list[int]) -> None:
        async with slots:
            vectors[index] = await _embed(services, owner, body, token_ids, body.field_of(index), adapter)

    await together(starmap(embed, enumerate(inputs)))
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
    sessions = services.sessions
    sessions.turns.room(len(token_ids), 0, param=field)
    metadata = {} if body.user is None else {"user": body.user}
    async with sessions.ephemeral(owner, metadata=metadata, unseen=True, adapter=adapter) as session:
        layer = services.info.num_layers - 1 if body.layer is None else body.layer
        when = When(position=len(token_ids) - 1 if body.pooling == "last" else None)
        sessions.whitebox.arm_now(session, Breakpoint("embedding", (layer,), Action.CAPTURE, when))
        await compute(sessions, session, token_ids, param=field)
        return finished(await sessions.whitebox.pool_captures(session, normed=body.layer is None), body)


def finished(vector: TensorData, body: EmbeddingBody) -> NDArray[np.float32]:
    """The first `dimensions` numbers of a pooled vector, at the length 1 if the body asks for that. Raises
    `FieldOutOfRange` if it has fewer.
    """
    whole = np.frombuffer(vector.data, "<f4")
    if body.dimensions is not None and body.dimensions > len(whole):  # the norm joins several residual streams to one
        raise FieldOutOfRange(f"dimensions must be at most {len(whole)}", param="dimensions")
    numbers = whole[: body.dimensions].astype(np.float64)
    if not np.isfinite(numbers).all():
        raise EngineError("the model gives numbers that are not finite for this input")
    length = np.linalg.norm(numbers)
    return (numbers / length if body.normalize and length else numbers).astype("<f4")


def write_embeddings(
    vectors: Sequence[NDArray[np.float32]], body: EmbeddingBody, info: ModelInfo, tokens: int
) -> bytes:
    """The answer as JSON. `tokens` is the count over all inputs."""
    written: list[Any] = list(vectors)
    if body.encoding_format == "base64":
        written = [base64.b64encode(each.tobytes()).decode() for each in vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(written)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": info.name, "usage": usage}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

"""The body and the answer of `/v1/embeddings`."""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field

from app.domain.breakpoints import TensorData
from app.domain.errors import EngineError, FieldOutOfRange
from app.domain.values import ModelInfo
from app.openai.completions import Prompt, prompts_of
from app.wire.base import fixed, shape
from app.wire.calls import OpenBody


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

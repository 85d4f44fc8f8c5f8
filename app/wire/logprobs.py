"""Log-probabilities as JSON. A long turn has millions of them, so there is no model for each, and others get a turn of
the event loop in between.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from pydantic import BaseModel

from app.domain.values import TokenLogprobs

SLICE = 256
"""Tokens that are written at a time: with 20 alternatives each, two milliseconds."""


async def json_with_logprobs(
    view: BaseModel, found: Sequence[TokenLogprobs] | None, written: list[bytes] | None = None
) -> bytes:
    """The JSON of `view`, whose own `logprobs` are None, with those that were `found` in their place. Without any there
    is no such field.

    `written` gets each whole slice, and the next answer that tells of the same and more takes it from there.
    """
    text = view.model_dump_json().encode()
    if found is None:
        return text
    parts = [] if written is None else written[:]
    for first in range(len(parts) * SLICE, len(found), SLICE):
        if first:
            await asyncio.sleep(0)
        tokens = found[first : first + SLICE]
        parts.append(orjson.dumps(_plain(tokens))[1:-1])
        if written is not None and len(tokens) == SLICE and len(written) < len(parts):
            written.append(parts[-1])  # unless another answer has done so meanwhile
    return b'%b,"logprobs":[%b]}' % (text[:-1], b",".join(parts))


def _plain(found: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": each.token_id,
            "logprob": each.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in each.top],
        }
        for each in found
    ]

"""A server that speaks OpenAI's protocol and holds a known number of agents."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.loadgen.stubs import openai_app, serving

SYSTEM, CONTEXT = 8, 60
FIRST_S = 0.1
"""All agents of a probe, who come at once, are there before the first turn of any is over."""


@dataclass
class Stub:
    """Delays resumed turns, or refuses them with `status`, while more than `border` agents have come in a probe."""

    border: int
    slow_s: float = 0.0
    status: int = 200
    seen: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The agents of each probe by their texts, one of whom comes before the clock starts."""

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        opening = re.match(r"Agent (\d+)\.(\d+) ", "".join(map(chr, prompt[SYSTEM:])))
        assert opening is not None
        agents = self.seen[opening[1]]
        agents.add(opening[2])
        if len(prompt) <= CONTEXT:
            return self._answer(FIRST_S, body["max_tokens"], len(prompt))
        crowded = len(agents) - 1 > self.border
        if crowded and self.status != 200:
            return JSONResponse({"detail": "too many agents"}, status_code=self.status)
        return self._answer(self.slow_s if crowded else 0.0, body["max_tokens"], len(prompt))

    def _answer(self, wait_s: float, tokens: int, prompt_tokens: int) -> Response:
        async def events() -> AsyncIterator[str]:
            await asyncio.sleep(wait_s)
            for _ in range(tokens):
                yield f"data: {json.dumps({'choices': [{'text': 'a', 'token_ids': [97]}]})}\n\n"
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@contextmanager
def serving_stub(stub: Stub) -> Iterator[str]:
    """Serve it; yields what `--target NAME=` takes."""
    with serving(openai_app(stub.complete)) as url:
        yield f"{url}#stub"

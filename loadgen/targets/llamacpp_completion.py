"""The events of one streamed completion, as llama.cpp's own `/completion` has them. Nothing here does I/O."""

from httpx_sse import ServerSentEvent
from pydantic import BaseModel

from client.errors import StreamBroken, error_from_event
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.targets.completion import read_chunk


class _Timings(BaseModel):
    cache_n: int


class _Chunk(BaseModel):
    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = False
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    timings: _Timings | None = None
    error: object = None


class LlamaCppDecoder:
    """llama.cpp's own completions, of which the last chunk counts what was done."""

    def __init__(self) -> None:
        self.text = ""
        self._ids: TokenIds = ()
        self._last: _Chunk | None = None

    @property
    def token_ids(self) -> TokenIds:
        """The ids if they are all there: it never tells those that end inside a UTF-8 character."""
        complete = self._last is not None and len(self._ids) == self._last.tokens_predicted
        return self._ids if complete else ()

    def feed(self, event: ServerSentEvent) -> bool:
        chunk = read_chunk(event, _Chunk)
        if chunk.error is not None:
            raise error_from_event(event.data, request_id=None)
        self.text += chunk.content
        self._ids += chunk.tokens
        if chunk.stop:
            self._last = chunk
        return bool(chunk.content or chunk.tokens)

    def cost(self) -> TurnCost:
        if self._last is None:
            raise StreamBroken("the stream ended before the completion did")
        return TurnCost(
            prompt_tokens=self._last.tokens_evaluated,
            completion_tokens=self._last.tokens_predicted,
            cached_tokens=None if self._last.timings is None else self._last.timings.cache_n,
            recomputed_tokens=None,
        )

"""The events of one streamed completion, as OpenAI has them. Nothing here does I/O."""

from typing import Protocol, TypeVar

from httpx_sse import ServerSentEvent
from pydantic import BaseModel, ValidationError

from client.errors import InvalidAnswer, StreamBroken, error_from_event
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost

DONE = "[DONE]"

Chunk = TypeVar("Chunk", bound=BaseModel)


class Decoder(Protocol):
    """Fed the events of a completion in order, collects its text, its cost, and its token ids if they are all told."""

    @property
    def text(self) -> str:
        """What was generated."""
        ...

    @property
    def token_ids(self) -> TokenIds:
        """The same as tokens; empty if the server does not tell them."""
        ...

    def feed(self, event: ServerSentEvent) -> bool:
        """Take one event; whether it brought tokens. Raises the error in it, or `InvalidAnswer`."""
        ...

    def cost(self) -> TurnCost:
        """What the turn cost. Raises `StreamBroken` if the completion did not end, `InvalidAnswer` without usage."""
        ...


class _Choice(BaseModel):
    text: str = ""
    token_ids: tuple[int, ...] | None = None


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(BaseModel):
    choices: tuple[_Choice, ...] = ()


class _Last(BaseModel):
    usage: _Usage | None = None
    error: object = None


class CompletionEnd:
    """How an OpenAI stream tells its usage, its errors and its end."""

    def __init__(self) -> None:
        self._usage: _Usage | None = None
        self._done = False

    def feed(self, event: ServerSentEvent) -> bool:
        """Take one event; whether it is the end. Raises the error in it, or `InvalidAnswer`."""
        if event.data == DONE:
            self._done = True
            return True
        last = read_chunk(event, _Last)
        if last.error is not None:
            raise error_from_event(event.data, request_id=None)
        self._usage = last.usage or self._usage
        return False

    def cost(self) -> TurnCost:
        """What the turn cost. Raises `StreamBroken` if the stream did not end, `InvalidAnswer` without usage."""
        if not self._done:
            raise StreamBroken("the stream ended before the completion did")
        if self._usage is None:
            raise InvalidAnswer("the completion came without usage")
        details = self._usage.prompt_tokens_details
        return TurnCost(
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            recomputed_tokens=None,
        )


class CompletionDecoder:
    """OpenAI's completions."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: TokenIds = ()
        self._end = CompletionEnd()

    def feed(self, event: ServerSentEvent) -> bool:
        if self._end.feed(event):
            return False
        chunk = read_chunk(event, _Chunk)
        for choice in chunk.choices:
            self.text += choice.text
            self.token_ids += choice.token_ids or ()
        return any(choice.text or choice.token_ids for choice in chunk.choices)

    def cost(self) -> TurnCost:
        return self._end.cost()


def read_chunk(event: ServerSentEvent, kind: type[Chunk]) -> Chunk:
    """The event as JSON of that kind. Raises `InvalidAnswer`."""
    try:
        return kind.model_validate_json(event.data)
    except ValidationError as error:
        raise InvalidAnswer(f"not a chunk of a completion: {event.data[:200]}") from error

"""The server that nothing happens to: what it answers is right."""

from client import AsyncDjinn, AsyncSession, DjinnError
from loadgen.errors import LoadgenError
from loadgen.load.prompts import TokenIds
from loadgen.targets.subject import greedy


class TwinFailed(LoadgenError):
    """The twin gave no answer: there is nothing to compare with."""


class Mirror:
    """A session on the twin that takes the turns of one agent. It follows every fork, rewind and move."""

    def __init__(self, twin: AsyncDjinn) -> None:
        self._twin = twin
        self._session: AsyncSession | None = None
        self._tokens: TokenIds = ()

    async def answer(self, history: TokenIds, prompt: TokenIds, tokens: int) -> TokenIds:
        """What `tokens` tokens follow `prompt` after `history`. Raises `TwinFailed`."""
        try:
            if self._session is None:
                self._session = await self._twin.sessions.create()
            kept = common(self._tokens, history)
            if kept < len(self._tokens):
                await self._session.rewind(kept)
            new = history[kept:] + prompt
            made = (await self._session.generate(**greedy(new, tokens))).token_ids
        except DjinnError as error:
            raise TwinFailed(f"the twin failed: {error}") from error
        self._tokens = history + prompt + made
        return made

    async def answer_once(self, prompt: TokenIds, tokens: int) -> TokenIds:
        """The same without a history, in a session that closes. Raises `TwinFailed`."""
        made = await self.answer((), prompt, tokens)
        await self.close()
        return made

    async def close(self) -> None:
        """Close its session. Raises `TwinFailed`."""
        if self._session is not None:
            try:
                await self._session.close()
            except DjinnError as error:
                raise TwinFailed(f"the twin failed: {error}") from error


def common(one: TokenIds, other: TokenIds) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

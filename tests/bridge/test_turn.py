"""The mailbox of a turn: what a slow reader has missed comes in slices, and all of it comes."""

from __future__ import annotations

import asyncio

from app.bridge.turn import SLICE, Mailbox, TokenRun
from app.domain.values import Ticket, TokenLogprobs
from app.messages import Token
from tests.others import turns_of_others


def filled(count: int) -> Mailbox:
    mailbox = Mailbox()
    for number in range(count):
        mailbox.put(Token(Ticket(1), number, TokenLogprobs(number, -0.5)))
    return mailbox


async def read(mailbox: Mailbox) -> list[TokenRun]:
    runs = []
    while not mailbox.drained:
        run = await mailbox.get()
        assert isinstance(run, TokenRun)
        runs.append(run)
    return runs


async def test_many_tokens_come_in_slices_and_in_order() -> None:
    runs = await read(filled(10 * SLICE + 1))
    assert max(len(run.token_ids) for run in runs) <= SLICE
    assert [token for run in runs for token in run.token_ids] == list(range(10 * SLICE + 1))
    assert [found.token_id for run in runs for found in run.logprobs] == list(range(10 * SLICE + 1))


async def test_others_run_between_two_slices() -> None:
    assert await turns_of_others(read(filled(10 * SLICE))) >= 9


async def test_a_reader_that_leaves_leaves_the_rest() -> None:
    mailbox = filled(3 * SLICE)
    await mailbox.get()
    reading = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert [found.token_id for found in mailbox.logprobs] == list(range(SLICE, 3 * SLICE))
    assert [token for run in await read(mailbox) for token in run.token_ids] == list(range(SLICE, 3 * SLICE))

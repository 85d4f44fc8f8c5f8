"""The memory that programs read a batch from."""

import torch
from torch import Tensor

from app.gpu.kernels.attention.batch import Batch, RowShape
from app.gpu.kernels.attention.cpu.paged import PAGED_TOKENS, token_tables

MOST_SHORT = 64
"""Tokens of a program that attend one query at a time: with more, they no longer matter beside the products."""


class Inputs:
    """Memory for `MOST_SHORT` tokens of short rows, and after them for `prompt_tokens` of prompts. Block tables keep
    entries of earlier steps past a token's context, where attention does not look.
    """

    def __init__(self, prompt_tokens: int, blocks: int, hidden_size: int, dtype: torch.dtype) -> None:
        """`blocks` of a sequence at most."""
        tokens, prompts = MOST_SHORT + prompt_tokens, -(-prompt_tokens // (PAGED_TOKENS + 1))
        self._hidden = torch.empty(tokens, hidden_size, dtype=dtype)
        self._positions, self._blocks, self._offsets = torch.zeros(3, tokens, dtype=torch.int64)
        self._tables = torch.zeros(MOST_SHORT + prompts, blocks, dtype=torch.int32)
        self._contexts = torch.zeros(len(self._tables), dtype=torch.int32)

    def short(self) -> tuple[Tensor, Batch]:
        """The residual stream and the batch of the most short rows, as views."""
        return self._views(MOST_SHORT, ())

    def mixed(self) -> tuple[Tensor, Batch]:
        """Those of all tokens: some rows are short, and the rest is one prompt."""
        tokens = len(self._hidden)
        rows = [RowShape(token, 1, 1) for token in range(MOST_SHORT)]
        prompt = RowShape(MOST_SHORT, tokens - MOST_SHORT, tokens - MOST_SHORT)
        return self._views(tokens, (*rows, prompt))

    def have_room(self, batch: Batch, short: int) -> bool:
        """Whether the batch, of which the first `short` rows are short, can be copied, and all others are prompts."""
        prompts = batch.rows[short:]
        tokens = sum(row.length for row in prompts)
        return (
            len(batch.positions) - tokens <= MOST_SHORT
            and tokens <= len(self._hidden) - MOST_SHORT
            and all(row.length > PAGED_TOKENS for row in prompts)
        )

    def fill(self, batch: Batch, short: int) -> int:
        """Copy the batch, of which the first `short` rows are short. Returns how many tokens those have."""
        tokens, tables = len(batch.positions), batch.block_tables
        first = batch.rows[short].start if short < len(batch.rows) else tokens
        self._positions[:tokens] = batch.positions
        self._blocks[:tokens] = batch.slot_blocks
        self._offsets[:tokens] = batch.slot_offsets
        self._tables[:first, : tables.shape[1]] = token_tables(batch, short)
        self._tables[MOST_SHORT : MOST_SHORT + len(tables) - short, : tables.shape[1]] = tables[short:]
        return first

    def _views(self, tokens: int, rows: tuple[RowShape, ...]) -> tuple[Tensor, Batch]:
        return self._hidden[:tokens], Batch(
            rows=rows,
            decodes=MOST_SHORT,
            positions=self._positions[:tokens],
            slot_blocks=self._blocks[:tokens],
            slot_offsets=self._offsets[:tokens],
            block_tables=self._tables[: len(rows) or tokens],
            contexts=self._contexts[: len(rows) or tokens],
        )

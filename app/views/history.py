"""What a session holds."""

from __future__ import annotations

from pydantic import BaseModel


class HistoryView(BaseModel):
    """Every token of a session, its prompts and what was generated. `text` shows special tokens too."""

    tokens: int
    token_ids: list[int]
    text: str

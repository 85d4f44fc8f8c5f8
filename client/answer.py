"""The base of everything that is read from an answer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A frozen value. Fields that a newer server adds are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

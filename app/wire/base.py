"""The bases of request bodies and of answers."""

from collections.abc import Iterable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from app.domain.errors import FieldOutOfRange

MAX_COUNT = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
T = TypeVar("T")
LongList = Annotated[list[T], Field(fail_fast=True)]
"""A list that a client may make long. Only its first wrong value becomes an error: each costs more than a right one."""


class WireModel(BaseModel):
    """Base of every request body: an unknown field, a wrong type and a NaN are errors, and so is text not in Unicode.

    Pydantic looks into a string, and finds lone surrogates, only if its length has a limit.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, str_min_length=0)


class View(BaseModel):
    """Base of answers that show the engine's own objects: it is built from any object that has its fields."""

    model_config = ConfigDict(from_attributes=True)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raise `FieldOutOfRange` unless every id is in the vocabulary."""
    wrong = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise FieldOutOfRange(f"{param}: token id {wrong} must be at most {vocab_size - 1}", param=param)

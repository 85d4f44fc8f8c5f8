"""The base of everything that is read from an answer."""

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


class Answer(BaseModel):
    """A frozen value. Fields that a newer server adds are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Listing(Answer, Generic[T]):
    """Several of one kind."""

    data: tuple[T, ...]

"""Bodies about the server itself."""

from typing import Literal

from pydantic import BaseModel


class Status(BaseModel):
    """That the server is up."""

    status: Literal["ok", "ready"]


class Version(BaseModel):
    """What runs here."""

    version: str
    model: str
    device: str
    dtype: str

"""The tools that every program gives its agent, and what they received."""

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
QUESTION = "What is the weather in Rome, and what time is it there?"
ORDER = ("weather", "clock")
"""The tool of each step; a third step has none, and ends in text."""

received: list[tuple[str, dict[str, Any]]] = []


class Report(BaseModel):
    """A structured answer. All of it is bounded, so that a model of any size comes to its end."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Paris"]
    degrees: int = Field(ge=-20, le=50)


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tell the weather.

    Args:
        city: the city to look up
    """
    received.append(("weather", {"city": city}))
    return f"22 degrees in {city}"


def clock(zone: Literal["UTC", "CET"]) -> str:
    """Tell the time.

    Args:
        zone: the time zone
    """
    received.append(("clock", {"zone": zone}))
    return "It is 12:30."


def tell(**found: Any) -> None:
    """Print what the test asserts on."""
    print(json.dumps({"received": received, **found}))

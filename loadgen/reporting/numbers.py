"""Numbers that JSON does not have."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

InfinityAsNull = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null is infinite"}),
]
"""A float that may be infinite: written as null, which is read back as infinity."""

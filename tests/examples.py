"""How much Hypothesis tries: a part in `make test`, all of it in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

FULL = "full"
"""The profile of `make test-all`: `--hypothesis-profile full`."""
PART = 5


def examples(number: int) -> int:
    """`number` in the full profile, a fifth of it otherwise. The test's module is marked `examples`."""
    return number if settings.get_current_profile_name() == FULL else max(1, number // PART)

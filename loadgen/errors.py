"""What stops a run before it starts, and what keeps one sample from being taken."""


class LoadgenError(Exception):
    """The run cannot start: a bad option, a bad trace, or a target that does not answer. The text says which."""


class NotAsMeant(LoadgenError):
    """What was measured is not what was meant. The text says why."""


def require_at_least(least: int, plan: object, *fields: str) -> None:
    """Raise `LoadgenError` for the first of these fields of the plan that is lower."""
    for name in fields:
        if getattr(plan, name) < least:
            raise LoadgenError(f"{name} must be at least {least}")

"""How many files this process may have open at once, connections included."""

import resource


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, as far as the system lets it; returns the soft limit.

    Shells start programs with a soft limit of 1,024, for the sake of old ones that cannot count further.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS calls its limit infinite, and then refuses that
        return soft
    return hard

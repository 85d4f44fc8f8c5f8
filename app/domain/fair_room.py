"""How much one holder may take of what all share: disk for files, memory for bodies, checkpoints and captures."""


def leaves_as_much(limit: int, *, taken: int, more: int, besides: int, whole: int) -> bool:
    """Whether a holder may have `more` for one thing, which is `whole` then, where all together have `taken`.

    A holder leaves as much of `limit` free as it takes, but for its only thing: it has `besides` of others (Choudhury
    and Hahne, *Dynamic queue length thresholds*, 1998). So each holder finds room, and one that is alone has half.
    """
    own = besides + whole if besides else 0
    return taken + more + own <= limit

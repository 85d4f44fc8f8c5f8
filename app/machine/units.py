"""Sizes and rates as people read them."""

MIB = 1 << 20
GIB = 1 << 30


def size(num_bytes: float) -> str:
    """In MiB below one GiB: "8.0 MiB", "79.1 GiB", and "-2.0 GiB" of what is missing."""
    unit, name = (GIB, "GiB") if abs(num_bytes) >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def counted(count: int, noun: str) -> str:
    """ "1 session", "2 sessions"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rate(bytes_per_second: float) -> str:
    """In powers of ten, as buses are sold: "55.2 GB/s"."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"

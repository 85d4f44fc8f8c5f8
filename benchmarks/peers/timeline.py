"""From the arrival times of tokens to the figures of the benchmark. Pure: seconds in, numbers out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stream:
    """One answered request. Times are seconds on one monotonic clock.

    arrivals: when each chunk of the answer came; tokens: how many tokens the server says they held.
    """

    submitted: float
    arrivals: list[float]
    tokens: int

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.arrivals[0] - self.submitted


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """What one concurrency gave.

    throughput: tokens/s from the first submission to the last token, prefill included.
    decode_rate: tokens/s after the last stream's first token, when every stream decodes.
    """

    streams: int
    tokens: int
    wall_s: float
    throughput: float
    decode_rate: float
    first_token_s: list[float]


def measure_decode(streams: list[Stream]) -> DecodePhase:
    """Reduces one phase. Raises ValueError where a rate has no meaning: no stream, or one without a second token
    after all have begun.
    """
    if not streams or any(not stream.arrivals for stream in streams):
        raise ValueError("a stream ended without a token")
    start = min(stream.submitted for stream in streams)
    end = max(stream.arrivals[-1] for stream in streams)
    tokens = sum(stream.tokens for stream in streams)
    return DecodePhase(
        streams=len(streams),
        tokens=tokens,
        wall_s=end - start,
        throughput=tokens / (end - start),
        decode_rate=_decode_rate(streams, end),
        first_token_s=[stream.first_token_s for stream in streams],
    )


def _decode_rate(streams: list[Stream], end: float) -> float:
    """Tokens/s after all first tokens. A server may put several tokens in a chunk: each counts as the stream's mean."""
    all_started = max(stream.arrivals[0] for stream in streams)
    if end <= all_started:
        raise ValueError("no token came after every stream had begun")
    later = 0.0
    for stream in streams:
        chunks = sum(1 for arrival in stream.arrivals if arrival > all_started)
        later += chunks * stream.tokens / len(stream.arrivals)
    return later / (end - all_started)

"""What a generator measured, in terms that mean the same for both."""

from dataclasses import dataclass

from benchmarks.generators.load import Load

PROMPT_TOLERANCE = 0.02
CACHED_TOLERANCE = 0.05


class OtherLoadError(Exception):
    """What a generator measured is not the load that was asked for: its figures cannot be compared."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Token counts are the server's own, over all requests that completed.

    TTFT is from the sending of a request to the first chunk with text. `tokens_per_s` counts completion tokens from the
    sending of the first request to the end of the last. `latest_s` is how long after its arrival the latest request was
    sent.
    """

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_p50_s: float
    ttft_mean_s: float
    tokens_per_s: float
    latest_s: float


def check_load(generator: str, load: Load, measured: Measured) -> None:
    """Raises OtherLoadError if this was another load.

    A generator that sends text gets the lengths of its prompts right only nearly. What the server knows already it
    need not compute.
    """
    faults = []
    if measured.requests != load.requests:
        faults.append(f"{measured.requests} of {load.requests} requests completed")
    if measured.completion_tokens != measured.requests * load.completion_tokens:
        faults.append(f"{measured.completion_tokens} completion tokens in {measured.requests} requests")
    wanted = measured.requests * load.prompt_tokens
    if abs(measured.prompt_tokens - wanted) > PROMPT_TOLERANCE * wanted:
        faults.append(f"{measured.prompt_tokens} prompt tokens instead of {wanted}")
    if measured.cached_tokens > CACHED_TOLERANCE * wanted:
        faults.append(f"{measured.cached_tokens} prompt tokens came from the prefix cache")
    if faults:
        raise OtherLoadError(f"{generator}, {load.name}: {'; '.join(faults)}")

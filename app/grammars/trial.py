"""A program that tries grammars out: `compiler.py` runs it. A grammar that takes too long or too much memory ends it.

It reads lines of JSON: first the arguments of llguidance's tokenizer, then a grammar a line. It answers each line with
one: an error as text, or null.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 0.75
MEMORY_BYTES = 4 << 30


def first_tokens(mask: bytes) -> Iterator[int]:
    """The first token that the mask allows, if there is one."""
    bits = int.from_bytes(mask, "little")
    if bits:
        yield (bits & -bits).bit_length() - 1


def try_out(tokenizer: LLTokenizer, source: str) -> str | None:
    """Compile the grammar and take a step in it; returns the error."""
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        for token in first_tokens(matcher.compute_bitmask()):
            if matcher.consume_token(token) and not matcher.is_stopped():
                matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else None


def main() -> None:
    """Answer until the input ends."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text, size, ends = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(text, n_vocab=size, eos_token=ends or None)
    print("null", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # whose signal ends the process
        error = try_out(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()

"""One turn's place in its grammar. Planning holds it, so nothing here imports PyTorch or NumPy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

COUNTED_MASKS = 16
MAX_MASKS_S = 0.08
"""CPU time for the masks of the last `COUNTED_MASKS` tokens of one turn: 5 ms each, or one that takes it all. All rows
of a step wait for the masks of all. JSON schemas take 0.01 to 0.3 ms a mask with 49,152 tokens, and at most 2.4 ms for
16 of them; a regex that is hard, `(.*a){100}`, takes 15 ms for 16.
"""
MAX_WORDS = 300
"""Characters of llguidance's own words in an error."""


class Matcher:
    """The tokens that have been generated, and those that may come next. Used by one thread at a time."""

    __slots__ = ("__weakref__", "_error", "_matcher", "_spent")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._error: str | None = None
        self._spent = deque[float](maxlen=COUNTED_MASKS)
        """CPU seconds for each of the last masks."""

    @property
    def error(self) -> str | None:
        """What is wrong, in llguidance's words; None: nothing. It stays."""
        return self._error or error_of(self._matcher)

    @property
    def ended(self) -> bool:
        """Whether the text is complete, and nothing may follow but a token that ends it."""
        return self._matcher.is_stopped() and self.error is None

    def fill(self, address: int, size: int) -> None:
        """Write a bit for each token to `size` bytes at `address`: 1 if it may come next. Releases the GIL."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, size)
        self._spent.append(time.thread_time() - began)
        spent = sum(self._spent)
        if spent > MAX_MASKS_S:
            self._error = f"the tokens that may follow took {spent:.2f} s to compute at the last {len(self._spent)}"

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Take tokens that have been generated. False: they do not match, or there is an `error`."""
        return self.error is None and self._matcher.consume_tokens(list(token_ids))

    def copy(self) -> Matcher:
        """Another one in the same place."""
        return Matcher(self._matcher.deep_copy())

    def after(self, token_id: int) -> Matcher | None:
        """Another one behind a token that may come next; None if it may not, or would end the text. The time that
        masks take is counted for both.
        """
        following = self.copy()
        following._spent, following._error = self._spent, self._error
        return following if following.consume((token_id,)) and not following.ended else None


def error_of(matcher: LLMatcher) -> str | None:
    """What is wrong; None: nothing."""
    if not matcher.is_error():
        return None
    return plain(matcher.get_error())


def plain(words: str) -> str:
    """llguidance's error without the state of its parser."""
    words = words.partition("\n<")[0].strip()
    return "no text matches it" if words == "NoExtensionBias" else words[:MAX_WORDS]

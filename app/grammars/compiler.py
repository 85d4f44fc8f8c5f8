"""Grammars compiled once, for all turns that use them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar
from app.grammars.matcher import Matcher, error_of, plain
from app.grammars.source import source_of
from app.grammars.trials import Trials
from app.grammars.vocabulary import Vocabulary
from app.model_store.resolve import ResolvedModel

MAX_CHARACTERS = 1 << 18
KEPT = 64
"""Compiled grammars that nobody holds."""


class Compiled:
    """A grammar, compiled. It is not forgotten while somebody holds this."""

    def __init__(self, start: Matcher) -> None:
        self.start = start
        """Before the first token."""


class Grammars:
    """The grammars of one model. Compiles on one thread of its own, without the GIL, and never one grammar twice at
    once. Any thread may call it.
    """

    def __init__(self, model: ResolvedModel, vocab_size: int) -> None:
        """`vocab_size` is that of the logits."""
        self._vocabulary = Vocabulary(model, vocab_size)
        self._trials = Trials(self._vocabulary)
        self._thread = ThreadPoolExecutor(1, "djinn-grammars")
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._recent: OrderedDict[Grammar, Compiled] = OrderedDict()

    def prepare(self) -> None:
        """Begin to read the vocabulary, which holds the GIL for about a second: better now than beside turns."""
        self._thread.submit(lambda: self._vocabulary.compiled)

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """Compile it, unless it is already. The result is for the caller to hold until its turns have begun.

        The future raises FieldOutOfRange, with the grammar's field, for one that is invalid, too large or too slow.
        """
        found = self._find(grammar)
        if found is None:
            return self._thread.submit(self._compile, grammar)
        done: Future[Compiled] = Future()
        done.set_result(found)
        return done

    def match(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher of a turn's own, after the tokens that the turn has generated. Raises FieldOutOfRange if they do
        not match. Waits for the compilation if nobody has asked for that before.
        """
        matcher = (self._find(grammar) or self.compile(grammar).result()).start.copy()
        if token_ids and not matcher.consume(token_ids):
            raise FieldOutOfRange(f"{grammar.field}: the tokens generated so far do not match it", param=grammar.field)
        return matcher

    def close(self) -> None:
        """Forget all; nothing may be called any more."""
        self._thread.shutdown(cancel_futures=True)
        self._trials.close()

    def _find(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            found = self._held.get(grammar)
            if found is not None:
                self._keep(grammar, found)
            return found

    def _compile(self, grammar: Grammar) -> Compiled:
        found = self._find(grammar)  # the one before it on this thread may have been the same
        if found is not None:
            return found
        compiled = Compiled(self._start_of(grammar))
        with self._lock:
            self._held[grammar] = compiled
            self._keep(grammar, compiled)
        return compiled

    def _start_of(self, grammar: Grammar) -> Matcher:
        if len(grammar.text) > MAX_CHARACTERS:
            raise _invalid(grammar, f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are compiled")
        try:
            source = source_of(grammar)
        except ValueError as error:
            raise _invalid(grammar, str(error)) from None
        wrong = self._trials.error(source)
        if wrong is not None:
            raise _invalid(grammar, wrong)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary.compiled, source, log_level=0, limits=limits)
        matcher.compute_bitmask()  # what it finds, all copies share
        wrong = error_of(matcher)
        if wrong is not None:
            raise _invalid(grammar, wrong)
        return Matcher(matcher)

    def _keep(self, grammar: Grammar, compiled: Compiled) -> None:
        """Make it the last to be forgotten."""
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        if len(self._recent) > KEPT:
            self._recent.popitem(last=False)


def _invalid(grammar: Grammar, words: str) -> FieldOutOfRange:
    return FieldOutOfRange(f"{grammar.field}: {plain(words)}", param=grammar.field)

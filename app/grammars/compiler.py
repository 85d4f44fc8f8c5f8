"""Grammars compiled once, for all turns that use them.

Some small grammars take minutes or gigabytes, and a compilation that has begun cannot be stopped. A process can.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, assert_never
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from app.domain.errors import Busy, FieldOutOfRange, RefusedGrammar
from app.domain.values import Grammar, GrammarKind
from app.grammars import trial
from app.grammars.matcher import Matcher, error_of, plain
from app.grammars.schemas import ENDLESS, endless_reference, path_of
from app.machine.memory import give_back_freed
from app.model_store.resolve import ResolvedModel, eos_token_ids, load_tokenizer

logger = logging.getLogger(__name__)

JSON_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,40}"
"""What may stand between two tokens of JSON: one space, or a line break with its indentation. llguidance's own default
has no limit, and small models repeat white space until their tokens run out."""


def source_of(grammar: Grammar) -> str:
    """Raises ValueError for a schema that is not JSON. Whether the rest is valid, compiling it shows."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICE:
            # One terminal, so one automaton: as alternatives of a rule, 2,000 choices exceed the parser's limits.
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return f"start: CHOICE\nCHOICE: {choices}"
        case _:
            assert_never(grammar.kind)


def unforced(source: str) -> str:
    """The same grammar in Lark's form. Where one text alone may follow, llguidance reads that text as tokens, and takes
    the special tokens that it spells for themselves. This grammar leaves all tokens to the model.
    """
    if source.startswith("{"):
        (one,) = json.loads(source)["grammars"]
        source = one["lark_grammar"] or f"start: %json {json.dumps(one['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{source}'


Arguments = tuple[str, int, list[int]]
"""What llguidance's tokenizer is made from: the fast tokenizer as JSON, the size, tokens that end a text."""
TOO_SLOW = f"it takes more than {trial.CPU_S:g} s to compile"
TOO_LARGE = "it takes too much memory or time to compile"
TIMEOUT_S = 30.0
"""For an answer. The process ends itself after much less time of a processor; this is for a machine that stalls."""


class Trials:
    """Starts the process at the first trial, and again after a grammar has ended it. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def error(self, source: str, vocabulary: Arguments) -> str | None:
        """What is wrong with a grammar in llguidance's form; None: nothing."""
        process = self._process or self._start(vocabulary)
        answer = _ask(process, source)
        if answer:
            words = json.loads(answer)
            assert words is None or isinstance(words, str)
            return words
        process.kill()
        ended_by = process.wait()
        self.close()
        return TOO_SLOW if ended_by == -signal.SIGPROF else TOO_LARGE

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes the pipes, and waits
                pass

    def _start(self, vocabulary: Arguments) -> subprocess.Popen[str]:
        # -P: the folder of the program is no place to import from.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(Path(trial.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C at the server's terminal is for the server
        )
        if not _ask(process, vocabulary):
            self.close()
            raise RuntimeError("the process that tries grammars out does not start")
        return process


def _ask(process: subprocess.Popen[str], question: object) -> str:
    """The line that answers; empty if the process has ended, or does not answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    answers, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    return process.stdout.readline() if answers else ""


Value = TypeVar("Value")
MAX_CHARACTERS = 1 << 18
KEPT = 64
"""Unused compiled grammars, and refused grammars."""
MAX_WAITING = 32
"""Grammars that wait for the one thread, with the one that it compiles."""
RETRY_AFTER_S = 5
BLAME_S = 1.0
"""For finding what is wrong in an invalid grammar. Other grammars wait meanwhile."""


Refusal = tuple[str, tuple[int, ...]]
"""What is wrong with a grammar, and the indices of those of its parts that are wrong alone: it is about the first."""


class Grammars:
    """The grammars of one model. Compiles on one thread of its own, without the GIL, and never one grammar twice at
    once. Any thread may call it.

    A grammar that is compiled is a matcher before the first token. It stays compiled while a turn holds that.
    """

    def __init__(self, model: ResolvedModel, vocab_size: int) -> None:
        """`vocab_size` is that of the logits, which may be more than the tokenizer has tokens."""
        self._model, self._vocab_size = model, vocab_size
        self._trials = Trials()
        self._thread = ThreadPoolExecutor(1, "djinn-grammars")
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[Grammar, Matcher] = WeakValueDictionary()
        self._recent: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._refused: OrderedDict[Grammar, Refusal] = OrderedDict()
        self._waiting = 0

    def prepare(self) -> None:
        """Begin to read the vocabulary, which holds the GIL for about half a second: better beside no turn."""
        self._thread.submit(self._read_vocabulary)

    def compile(self, grammar: Grammar) -> Future[Matcher]:
        """Compile it, unless it is already. The result is for the caller to hold until its turns have begun. A future
        that is cancelled before its grammar's turn has come costs no compilation.

        Raises `Busy` if too many grammars wait. The future raises FieldOutOfRange, with the grammar's field, for one
        that is invalid, too large or too slow.
        """
        known: Future[Matcher] = Future()
        try:
            found = self._find(grammar)
        except FieldOutOfRange as error:
            known.set_exception(error)
            return known
        if found is not None:
            known.set_result(found)
            return known
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise Busy(f"{grammar.field}: {MAX_WAITING} grammars wait to be compiled", retry_after_s=RETRY_AFTER_S)
            self._waiting += 1
        compiling = self._thread.submit(self._compile, grammar)
        compiling.add_done_callback(self._leave)
        return compiling

    def match(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher of a turn's own, after the tokens that the turn has generated. Raises FieldOutOfRange if they do
        not match. Waits for the compilation if it is the first request for it.
        """
        compiled = self._find(grammar) or self._thread.submit(self._compile, grammar).result()
        matcher = compiled.copy()
        if token_ids and not matcher.consume(token_ids):
            raise FieldOutOfRange.at(grammar.field, "the tokens generated so far do not match it")
        return matcher

    def close(self) -> None:
        """Forget all; nothing may be called any more."""
        self._thread.shutdown(cancel_futures=True)
        self._trials.close()

    @cached_property
    def _arguments(self) -> Arguments:
        tokenizer = load_tokenizer(self._model)
        tokenizer.backend.no_padding()
        tokenizer.backend.no_truncation()
        ends = eos_token_ids(self._model, tokenizer)
        known = sorted(each for each in ends if 0 <= each < self._vocab_size)
        if len(known) < len(ends):
            others = ", ".join(map(str, sorted(ends.difference(known))))
            logger.warning("eos_token_id: grammars leave out %s, as the vocabulary has %d", others, self._vocab_size)
        return tokenizer.backend.to_str(), self._vocab_size, known

    @cached_property
    def _special_texts(self) -> list[str]:
        """The spellings of special tokens, plain and in JSON."""
        found = [token["content"] for token in json.loads(self._arguments[0])["added_tokens"] if token["special"]]
        return [*found, *(json.dumps(each)[1:-1] for each in found)]

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """A tree of bytes. It is read at the first use, which takes about a second."""
        text, size, ends = self._arguments
        return LLTokenizer(text, n_vocab=size, eos_token=ends or None)

    def _read_vocabulary(self) -> None:
        try:
            _ = self._vocabulary, self._special_texts
            give_back_freed()
        except Exception:
            logger.exception("this model's vocabulary cannot be read: calls with a grammar will fail")

    def _leave(self, _: Future[Matcher]) -> None:
        with self._lock:
            self._waiting -= 1

    def _find(self, grammar: Grammar) -> Matcher | None:
        """The grammar, if it is compiled. Raises FieldOutOfRange for one that was refused before."""
        with self._lock:
            refusal = self._refused.get(grammar)
            if refusal is not None:
                _keep(self._refused, grammar, refusal)
                raise _invalid(grammar, refusal)
            found = self._held.get(grammar)
            if found is not None:
                _keep(self._recent, grammar, found)
            return found

    def _compile(self, grammar: Grammar) -> Matcher:
        if len(grammar.text) > MAX_CHARACTERS:
            too_long = f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are compiled"
            raise _invalid(grammar, (too_long, ()))
        found = self._find(grammar)  # the one before it on this thread may have been the same
        if found is not None:
            return found
        try:
            compiled = self._start_of(grammar)
        except ValueError as error:
            refusal = self._blame(grammar, str(error))
            with self._lock:
                _keep(self._refused, grammar, refusal)
            raise _invalid(grammar, refusal) from None
        with self._lock:
            self._held[grammar] = compiled
            _keep(self._recent, grammar, compiled)
        return compiled

    def _blame(self, grammar: Grammar, words: str) -> Refusal:
        """What is wrong with a grammar that was refused with `words`: all of its parts that are refused too."""
        until = time.monotonic() + BLAME_S
        if not grammar.parts:
            return self._place(grammar, words, until) + words, ()
        odd: list[tuple[int, str]] = []
        for index, (_, part) in enumerate(grammar.parts):
            wrong = None if time.monotonic() > until else self._error(part)
            if wrong is not None:
                odd.append((index, wrong))
        if not odd:
            unsure = time.monotonic() > until  # not all parts were tried
            return ("" if unsure else "the calls of all tools together: ") + words.partition("\n")[0], ()
        name, part = grammar.parts[odd[0][0]]
        return f"{name}: {self._place(part, odd[0][1], until)}{odd[0][1]}", tuple(index for index, _ in odd)

    def _place(self, grammar: Grammar, words: str, until: float) -> str:
        """Where in a schema that is refused with `words` the value is that it is refused for; empty: unknown."""
        if grammar.kind is not GrammarKind.JSON_SCHEMA or words.endswith((TOO_SLOW, TOO_LARGE, ENDLESS)):
            return ""

        def is_refused(schema: object) -> bool:
            if time.monotonic() > until:
                raise TimeoutError
            return self._error(replace(grammar, text=json.dumps(schema))) == words

        try:
            path = ".".join(path_of(json.loads(grammar.text), is_refused))
        except (ValueError, TimeoutError):
            return ""
        return f"at {path}: " if path else ""

    def _error(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar; None: nothing."""
        every = grammar, *(part for _, part in grammar.parts)
        schemas = [each.text for each in every if each.kind is GrammarKind.JSON_SCHEMA and "$ref" in each.text]
        try:
            for path in filter(None, map(endless_reference, map(json.loads, schemas))):
                return f"at {path}: {ENDLESS}"
            wrong = self._trials.error(self._source(grammar), self._arguments)
        except ValueError as error:
            return str(error)
        return None if wrong is None else plain(wrong)

    def _source(self, grammar: Grammar) -> str:
        """Raises ValueError as `source_of` does."""
        source = source_of(grammar)
        return unforced(source) if any(text in source for text in self._special_texts) else source

    def _start_of(self, grammar: Grammar) -> Matcher:
        """Raises ValueError with what is wrong."""
        wrong = self._error(grammar)
        if wrong is not None:
            raise ValueError(wrong)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, self._source(grammar), log_level=0, limits=limits)
        matcher.compute_bitmask()  # what it finds, all copies share
        wrong = error_of(matcher)
        if wrong is not None:
            raise ValueError(wrong)
        return Matcher(matcher)


def _keep(recent: OrderedDict[Grammar, Value], grammar: Grammar, value: Value) -> None:
    """Make it the last to be forgotten."""
    recent[grammar] = value
    recent.move_to_end(grammar)
    if len(recent) > KEPT:
        recent.popitem(last=False)


def _invalid(grammar: Grammar, refusal: Refusal) -> RefusedGrammar:
    words, odd = refusal
    fields = [grammar.parts[index][1].field for index in odd]
    field = fields[0] if fields else grammar.field
    return RefusedGrammar(f"{field}: {plain(words)}", param=field, odd=fields)

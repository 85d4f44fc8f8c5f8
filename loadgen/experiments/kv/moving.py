"""Sessions that go from one server to another: whether they go on as if they had never moved, and what that costs
beside computing them anew.
"""

import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median

from client import AsyncSession
from loadgen.load.clocks import Stopwatch
from loadgen.load.prompts import Corpus, TokenIds, fresh_prompts
from loadgen.load.records import taken
from loadgen.report.report import Chart, Failure, noting
from loadgen.report.tables import Figure, Row, Spread, Table, all_of
from loadgen.targets.djinn import Subject, greedy

NEW_TOKENS = 16
"""Of text that are added after the move."""
TIMED = ("export", "import", "first_token", "move", "anew")
COSTS, PARTS, JOURNEYS = "What a move costs, milliseconds", "parts of a move", "journeys"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A turn after the move: seconds to its first token, and how many prompt tokens had no KV and were computed."""

    seconds: float
    computed_tokens: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Journey:
    """One move of a session of `tokens` tokens, in seconds and bytes.

    `stayed` is the turn on the server that the session came from, of the session that never moved; `moved` the same
    turn on the other server; `anew` a turn there of a history as long, which has to be computed first.
    """

    tokens: int
    file_bytes: int
    export_s: float
    import_s: float
    stayed: FirstToken
    moved: FirstToken
    anew: FirstToken

    @property
    def same(self) -> int:
        """How many tokens of the two answers are the same until the first that differs."""
        pairs = zip(self.stayed.token_ids, self.moved.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def move_s(self) -> float:
        """From the beginning of the export to the first token on the other server."""
        return self.export_s + self.import_s + self.moved.seconds

    @property
    def row(self) -> Row:
        """All of it."""
        return {
            **taken(self, "tokens", "file_bytes", "export_s", "import_s", "move_s"),
            "first_token_s": self.moved.seconds,
            "anew_s": self.anew.seconds,
            "same_tokens": self.same,
            "tokens_said": len(self.stayed.token_ids),
            "computed_tokens": self.moved.computed_tokens,
            "computed_where_it_stayed": self.stayed.computed_tokens,
            "computed_anew": self.anew.computed_tokens,
        }


async def warm(subjects: Sequence[Subject], tokens: int, decoded: int) -> None:
    """Run a turn on each: what is slow only once stays out of the measurement. Raises `LoadgenError`, `DjinnError`."""
    for subject in subjects:
        await subject.prepare(tokens + NEW_TOKENS + 1 + decoded)
        await subject.answer(await subject.tokenize("Nobody else says this.", True), decoded)


async def move_all(
    origin: Subject,
    goal: Subject,
    lengths: Sequence[int],
    repeats: int,
    decoded: int,
    corpus: Corpus,
    seed: int,
    failures: list[Failure],
    step: Callable[[], None],
) -> list[Journey]:
    """Length after length. The first move that fails ends its length: the others would fail in the same way."""
    journeys: list[Journey] = []
    with tempfile.TemporaryDirectory(prefix="loadgen-move-") as folder:
        file = Path(folder) / "session.safetensors"
        for length in lengths:
            with noting(f"moves of {length:,} tokens", failures):
                texts = await fresh_prompts(2 * repeats, length + NEW_TOKENS, corpus, seed, origin.tokenize)
                for text, other in zip(texts[::2], texts[1::2], strict=True):
                    journeys.append(await _travel(origin, goal, text[:length], text[length:], other, decoded, file))
                    file.unlink()
                    step()
    return journeys


async def _travel(
    origin: Subject, goal: Subject, history: TokenIds, new: TokenIds, other: TokenIds, decoded: int, file: Path
) -> Journey:
    """Prefill on `origin`, export to `file`, import on `goal`, and go on in both places; then answer `other` on `goal`.

    Raises `client.DjinnError` where a server refuses, and `OSError`.
    """
    watch = Stopwatch()
    async with origin.session() as session:
        await session.generate(**greedy(history, 1))
        watch.lap()
        await session.export_to(file)
        export_s = watch.lap()
        async with goal.imported(file) as arrived:
            import_s = watch.lap()
            moved = await _first_token(arrived, new, decoded)
        stayed = await _first_token(session, new, decoded)
    async with goal.session() as fresh:
        anew = await _first_token(fresh, other, 1)
    size = (await asyncio.to_thread(file.stat)).st_size
    return Journey(len(history), size, export_s, import_s, stayed=stayed, moved=moved, anew=anew)


async def _first_token(session: AsyncSession, new: TokenIds, tokens: int) -> FirstToken:
    """Run a turn of exactly `tokens` tokens."""
    watch = Stopwatch()
    seconds = math.nan
    async with session.stream(**greedy(new, tokens)) as stream:
        async for event in stream:
            if event.token_ids and math.isnan(seconds):
                seconds = watch.lap()
    usage = stream.turn.usage
    return FirstToken(seconds, usage.prompt_tokens - usage.cached_tokens, stream.turn.token_ids)


def figures(journeys: Sequence[Journey]) -> list[Figure]:
    """Whether sessions said the same, and how many times sooner a move is than computing anew."""
    found = []
    for length in sorted({journey.tokens for journey in journeys}):
        alike, by = [each for each in journeys if each.tokens == length], {"tokens": f"{length:,}"}
        equal = sum(each.stayed.token_ids == each.moved.token_ids for each in alike)
        found.append(all_of("moved sessions that say what they say where they were", equal, len(alike), by))
        gains = Spread.over([each.anew.seconds / each.move_s for each in alike])
        found.append(Figure("computed anew, over moved: until the first token", "×", gains, by=by))
    return found


def tables(journeys: Sequence[Journey]) -> list[Table]:
    """Medians by length, and every move."""
    rows: list[Row] = []
    parts: list[Row] = []
    for length in sorted({journey.tokens for journey in journeys}):
        found = [each.row for each in journeys if each.tokens == length]
        ms = {name: 1000 * median(float(str(row[f"{name}_s"])) for row in found) for name in TIMED}
        rows.append(
            {
                "tokens": length,
                "MiB": found[0]["file_bytes"] / 2**20,  # type: ignore[operator]
                **{name.replace("_", " "): value for name, value in ms.items() if name not in ("move", "anew")},
                "together": ms["move"],
                "computed anew": ms["anew"],
                "µs a token, moved": 1000 * ms["move"] / length,
                "µs a token, anew": 1000 * ms["anew"] / length,
                "most tokens computed on arrival": max(row["computed_tokens"] for row in found),  # type: ignore[type-var]
            }
        )
        parts += [{"tokens": f"{length:,}", "part": it, "ms": ms[it]} for it in ("export", "import", "first_token")]
    note = (
        "Medians. The file goes through the load generator's disk. Computed anew: the first token of another history "
        f"of that length, on the same server. Of what is computed on arrival, {NEW_TOKENS} are the new text and one "
        "the last token before the move."
    )
    every = [journey.row for journey in journeys]
    return [Table(COSTS, rows, note), Table(PARTS, parts, shown=False), Table(JOURNEYS, every, shown=False)]


def chart() -> Chart:
    """What a move is made of."""
    title, caption = "What a move is made of", "Medians of each part, on top of each other."
    return Chart(title, caption, "stack", PARTS, "tokens", "ms", "part", {}, "tokens of history", "milliseconds")

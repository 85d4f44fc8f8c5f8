"""How far a run is, in words and bars."""

from collections.abc import Mapping

from rich.text import Text

from loadgen.experiments.density.curves import MOVING, TIERS
from loadgen.experiments.density.progress import Progress
from loadgen.results.text import duration, milliseconds

BAR_WIDTH = 24
TIER_WIDTH = 7
EIGHTHS = " ▏▎▍▌▋▊▉█"


def block(title: str, progress: Progress | str) -> list[Text]:
    """The run that is on, in a few short lines; before it begins, `progress` says what happens."""
    if isinstance(progress, str):
        return [Text.assemble((title, "bold"), f"  {progress}")]
    done = progress.completed + progress.failed
    head = Text.assemble(
        (f"{title}  ", "bold"), (bar(done, progress.planned, BAR_WIDTH), "cyan"), f"  {turns(progress)}"
    )
    lines = [head]
    for label, words in (("time", times(progress)), ("agents", agents(progress)), ("speed", speed(progress))):
        lines.append(Text(f"  {label:10}{words}"))
    if progress.sessions:
        lines.append(Text(f"  sessions  {tiers(progress.sessions)}"))
    return lines


def summary_line(target: str, progress: Progress | None) -> Text:
    """A target whose turn is over, or yet to come."""
    if progress is None:
        return Text(f"{target}  waits", "dim")
    words = f"{target}  {turns(progress)}; {duration(progress.elapsed_s)}; {speed(progress)}"
    return Text(words, no_wrap=True, overflow="ellipsis")


def told(title: str, progress: Progress | str) -> str:
    """Everything in one line, without anything that only a terminal can show."""
    if isinstance(progress, str):
        return f"{title}: {progress}"
    held = ", ".join(f"{tier} {count}" for tier, count in progress.sessions.items())
    parts = (turns(progress), agents(progress), speed(progress), f"sessions: {held}" if held else "", times(progress))
    return f"{title}: {'; '.join(part for part in parts if part)}"


def tiers(sessions: Mapping[str, int]) -> str:
    """A bar for each tier, of all sessions, and those that are on their way."""
    every = sum(sessions.values())
    bars = (f"{tier} {bar(sessions[tier], every, TIER_WIDTH)} {sessions[tier]}" for tier in TIERS)
    return "  ".join((*bars, f"{sessions[MOVING]} {MOVING}"))


def turns(progress: Progress) -> str:
    """How many of the turns there are."""
    return f"{progress.completed:,} of {progress.planned:,} turns, {progress.failed:,} failed"


def agents(progress: Progress) -> str:
    """How many agents have arrived, and what they do."""
    arrived = progress.thinking + progress.generating + progress.done
    doing = f"{progress.thinking} thinking, {progress.generating} generating, {progress.done} done"
    return f"{arrived:,} of {progress.agents:,} arrived: {doing}"


def speed(progress: Progress) -> str:
    """How fast the server is."""
    resumed = "-"
    if progress.resumed_p50_s is not None:
        resumed = f"p50 {milliseconds(progress.resumed_p50_s)} ms, p99 {milliseconds(progress.resumed_p99_s)} ms"
    return f"resumed TTFT {resumed}; {progress.tokens:,} tokens, {progress.tokens_per_s:,.0f} tokens/s"


def times(progress: Progress) -> str:
    """How long it has taken, and will."""
    left = "" if progress.left_s is None else f", about {duration(progress.left_s)} left"
    return f"{duration(progress.elapsed_s)}{left}"


def bar(part: float, whole: float, width: int) -> str:
    """A bar of that many columns, filled to an eighth of a column."""
    eighths = round(8 * width * min(1.0, part / whole)) if whole else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width, "·")

"""Pictures for notebooks, as SVG: heatmaps with words, attention patterns, a session. They need no other package.

What has a picture returns it from `_repr_svg_`, which notebooks ask for. Later layers are above earlier ones.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

FONT = "font-family='ui-monospace, monospace' font-size='11'"
CHAR, LINE, GAP = 6.7, 18, 8
"""Pixels: the width of a character, the height of a row, and what is around them."""
MOST_CHARS = 9
PANEL, PANELS_IN_ROW = 130, 6
MORE, LESS, INK = (33, 102, 172), (178, 24, 43), "#1b1f23"
"""Blue is for what is above 0, red for what is below."""
PALETTE = bytes(round(255 + (end - 255) * step / 255) for step in range(256) for end in MORE)


class Cell(NamedTuple):
    """A field of a heatmap: its words, its colour's strength from -1 to 1, and what is told of it at a closer look."""

    text: str
    strength: float
    title: str


class Picture(NamedTuple):
    """A part of an SVG."""

    width: float
    height: float
    body: str


def svg(parts: Sequence[Picture]) -> str:
    """A file with the parts, one below the other."""
    width, height, groups = max(part.width for part in parts), 0.0, []
    for part in parts:
        groups.append(f"<g transform='translate(0 {height:g})'>{part.body}</g>")
        height += part.height
    size = f"width='{width:g}' height='{height:g}' viewBox='0 0 {width:g} {height:g}'"
    ground = "<rect width='100%' height='100%' fill='#fff'/>"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>{ground}{''.join(groups)}</svg>"


def shown(text: str, most: int = MOST_CHARS) -> str:
    """A token's text as it fits in a cell, with spaces and line ends that can be seen."""
    seen = text.replace(" ", "·").replace("\n", "↵")
    return seen if len(seen) <= most else f"{seen[: most - 1]}…"


def heatmap(
    caption: str, columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[Cell | None]]
) -> Picture:
    """A row for each of `rows`, the last one on top, with a cell for each of `columns` or None."""
    wide = CHAR * max(map(len, (*columns, *(cell.text for row in cells for cell in row if cell)))) + GAP
    left, top = CHAR * max(map(len, rows)) + 2 * GAP, 2.0 * LINE + GAP
    parts = [_words(GAP, LINE, caption, weight="bold")]
    parts += [_words(left + (at + 0.5) * wide, 2 * LINE, name, "middle") for at, name in enumerate(columns)]
    for down, (name, row) in enumerate(zip(reversed(rows), reversed(cells), strict=True)):
        y = top + down * LINE
        parts.append(_words(left - GAP / 2, y + LINE - 5, name, "end"))
        parts += [_cell(left + at * wide, y, wide, cell) for at, cell in enumerate(row) if cell]
    return Picture(left + len(columns) * wide + GAP, top + len(rows) * LINE + GAP, "".join(parts))


def _cell(x: float, y: float, wide: float, cell: Cell) -> str:
    strength = min(1.0, abs(cell.strength))
    color = tuple(round(255 + (end - 255) * strength) for end in (MORE if cell.strength >= 0 else LESS))
    ink = "#fff" if strength > 0.55 else INK
    return (
        f"<g><title>{_written(cell.title)}</title>"
        f"<rect x='{x:g}' y='{y:g}' width='{wide - 1:g}' height='{LINE - 1}' fill='rgb{color}'/>"
        f"{_words(x + wide / 2, y + LINE - 5, cell.text, 'middle', ink)}</g>"
    )


def _words(x: float, y: float, text: str, anchor: str = "start", ink: str = INK, weight: str = "normal") -> str:
    look = f"text-anchor='{anchor}' fill='{ink}' font-weight='{weight}'"
    return f"<text x='{x:g}' y='{y:g}' {look} xml:space='preserve'>{_written(text)}</text>"


def _written(text: str) -> str:
    """Text in XML, which has no control characters and no halves of surrogates."""
    return escape("".join(char if char.isprintable() else "�" for char in text))


def patterns(caption: str, heads: Sequence[int], pattern: NDArray[Any]) -> Picture:
    """Attention `[queries, heads, keys]`, from 0 to 1: a panel for each head, with a row for each query."""
    parts, step = [_words(GAP, LINE, f"{caption}: each row looks at columns", weight="bold")], PANEL + GAP
    for at, head in enumerate(heads):
        down, across = divmod(at, PANELS_IN_ROW)
        x, y = GAP + across * step, LINE + GAP + down * (step + LINE)
        parts.append(_words(x, y + LINE - 5, f"head {head}"))
        parts.append(
            f"<image x='{x}' y='{y + LINE}' width='{PANEL}' height='{PANEL}' preserveAspectRatio='none' "
            f"style='image-rendering:pixelated' href='data:image/png;base64,{_png(pattern[:, at])}'/>"
            f"<rect x='{x}' y='{y + LINE}' width='{PANEL}' height='{PANEL}' fill='none' stroke='#ccc'/>"
        )
    rows = -(-len(heads) // PANELS_IN_ROW)
    across = max(min(len(heads), PANELS_IN_ROW) * step + GAP, round(CHAR * (len(caption) + 30)))
    return Picture(across, LINE + 2 * GAP + rows * (step + LINE), "".join(parts))


def _png(values: NDArray[Any]) -> str:
    """Numbers from 0 to 1 as pixels, in base64: https://www.w3.org/TR/png-3/, with a palette."""
    height, width = values.shape
    pixels = (values.clip(0, 1) * 255).round().astype("u1")
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"PLTE", PALETTE), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def facts(caption: str, mark: tuple[str, str], lines: Sequence[str], bars: Sequence[tuple[str, float, str]]) -> Picture:
    """A caption with a marked word in a colour, lines of text, and named bars with a share from 0 to 1 and a colour."""
    word, color = mark
    wide = CHAR * max(len(caption) + len(word) + 6, *map(len, lines), 60) + 2 * GAP
    x = GAP + CHAR * (len(caption) + 2)
    parts = [
        _words(GAP, LINE, caption, weight="bold"),
        f"<rect x='{x:g}' y='5' width='{CHAR * len(word) + GAP:g}' height='{LINE}' rx='8' fill='{color}'/>",
        _words(x + GAP / 2, LINE, word, ink="#fff"),
    ]
    parts += [_words(GAP, LINE * (at + 2) + 4, line) for at, line in enumerate(lines)]
    top = LINE * (len(lines) + 1) + GAP
    for at, (name, share, tint) in enumerate(bars):
        y = top + at * LINE
        parts.append(_words(GAP, y + LINE - 5, name))
        parts.append(f"<rect x='{wide / 2:g}' y='{y + 3}' width='{wide / 2 - GAP:g}' height='12' fill='#eee'/>")
        length = share * (wide / 2 - GAP)
        parts.append(f"<rect x='{wide / 2:g}' y='{y + 3}' width='{length:g}' height='12' fill='{tint}'/>")
    return Picture(wide, top + len(bars) * LINE + GAP, "".join(parts))

"""Where a chunked answer ends, found without taking it apart: its bytes pass as they came."""

from __future__ import annotations

LONGEST_LINE = 64
"""Bytes of a line with the size of a chunk."""
END = b"\r\n"


class BadChunks(Exception):
    """What came is no chunked body."""


class Chunks:
    """Follows one chunked body of a replica."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the last chunk has come."""
        self.is_clean = False
        """Whether nothing came behind it: the connection can be used again."""
        self._left = 0
        """Bytes of the chunk that are still to come, its line end included."""
        self._held = b""
        """The part of a line that has come."""

    def take(self, data: bytes) -> bytes:
        """What may pass now: whole chunks, and parts of large ones, but never the last, empty one. Raises
        `BadChunks`.
        """
        if len(data) <= self._left:  # in the middle of a large chunk
            self._left -= len(data)
            return data
        if self._held:
            data, self._held = self._held + data, b""
        place = self._left
        while place < len(data):
            end = data.find(END, place, place + LONGEST_LINE)
            if end < 0:
                if len(data) - place >= LONGEST_LINE:
                    raise BadChunks("a chunk begins without its size")
                return self._hold(data, place)
            size = _size(data[place:end])
            if not size:
                return self._finish(data, place, end + len(END))
            place = end + len(END) + size + len(END)
        self._left = place - len(data)
        return data

    def _hold(self, data: bytes, place: int) -> bytes:
        self._held, self._left = data[place:], 0
        return data[:place]

    def _finish(self, data: bytes, place: int, rest: int) -> bytes:
        """Trailers are dropped, and the connection with them: replicas send none."""
        last = data[rest : rest + len(END)]
        if last != END and END.startswith(last):
            return self._hold(data, place)
        self.is_over, self.is_clean = True, data[rest:] == END
        return data[:place]


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits.isalnum():
        raise BadChunks("a chunk begins without its size")
    try:
        return int(digits, 16)
    except ValueError:
        raise BadChunks("a chunk's size is no number") from None

"""The end of a JSON object in text that comes in pieces."""


class JsonScan:
    """Follows brackets and strings. Whether the object is valid, only reading it shows."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for index, character in enumerate(text):
            if self.is_complete:
                return index
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_complete = self._depth <= 0
        return len(text)

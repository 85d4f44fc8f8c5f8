"""The model of servers that an experiment starts by itself."""

from pathlib import Path


def whole_model(given: str | Path) -> str:
    """A folder by its whole path; anything else, such as `random:tiny-llama`, as it is."""
    path = Path(given).expanduser()
    return str(path.absolute()) if path.exists() else f"{given}"

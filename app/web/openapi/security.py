"""How a request gives its API key, as the document has it."""

from typing import Any

OPEN_PATHS = frozenset({"/health", "/", "/docs"})
"""Those that need no key on any server."""
OPEN_FOLDER = "/static/"
"""What is under it needs none either: the page's files hold no data."""

SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "an API key"},
    "header": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "an API key, as clients of Anthropic's API send it",
    },
}


def is_open(path: str) -> bool:
    """Whether anybody may ask for the path."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def describe_security(document: dict[str, Any]) -> None:
    """Document the keys that the routes take.

    - Every route takes a key in each of the `SCHEMES`.
    - A request without a key is allowed too, because a server without keys needs none.
    - The routes of `OPEN_PATHS` need no key on any server.
    """
    document["components"]["securitySchemes"] = SCHEMES
    document["security"] = [{name: []} for name in SCHEMES] + [{}]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []

"""`from djinn import Djinn`: the Python client of a Djinn server. `Djinn` blocks, `AsyncDjinn` is for asyncio.

docs/client.md shows both. These are the public names of `client`, whose own name others may have too.
"""

from client import *  # noqa: F403
from client import __all__ as __all__

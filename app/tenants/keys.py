"""API keys: how they are made, and what stands for them wherever they are stored or compared."""

import hashlib
import secrets

KEY_BYTES = 32
"""Random bytes of a new key."""


def new_key() -> str:
    """A key that cannot be guessed."""
    return f"djinn-{secrets.token_urlsafe(KEY_BYTES)}"


def digest(key: bytes) -> str:
    """The SHA-256 digest in hexadecimal, as a file of tenants has it. It cannot be turned back into the key."""
    return hashlib.sha256(key).hexdigest()

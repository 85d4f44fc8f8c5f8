"""Thoughts that a client keeps for the server: it cannot read or change them, and gives them back as they are."""

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Self

NONCE_BYTES = 16
TAG_BYTES = 32


class Seal:
    """Encrypts with SHAKE-256 as a stream cipher, then authenticates with HMAC-SHA-256."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Servers with one `secret` open what another has sealed. None: it opens its own, until it ends."""
        self._secret = secret or secrets.token_bytes(32)
        self._cipher_key, self._tag_key = (
            hmac.digest(self._secret, purpose, "sha256") for purpose in (b"djinn thoughts", b"djinn thoughts tag")
        )

    def of(self, owner: str | None) -> Self:
        """The seal of one tenant: it opens nothing that another's has closed."""
        return type(self)(hmac.digest(self._secret, (owner or "").encode(), "sha256"))

    def close(self, text: str) -> str:
        """The text, sealed: no two times alike."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        hidden = self._cipher(nonce, text.encode(errors="surrogatepass"))
        return urlsafe_b64encode(nonce + self._tag(nonce + hidden) + hidden).decode()

    def open(self, sealed: str) -> str | None:
        """The text that was sealed; None: by another server, or it is not as it was."""
        try:
            data = urlsafe_b64decode(sealed)
        except ValueError:
            return None
        nonce, tag, hidden = data[:NONCE_BYTES], data[NONCE_BYTES:][:TAG_BYTES], data[NONCE_BYTES + TAG_BYTES :]
        if not hmac.compare_digest(tag, self._tag(nonce + hidden)):
            return None
        return self._cipher(nonce, hidden).decode(errors="surrogatepass")

    def _cipher(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._cipher_key + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, data: bytes) -> bytes:
        return hmac.digest(self._tag_key, data, "sha256")

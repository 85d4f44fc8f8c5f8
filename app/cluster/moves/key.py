"""The secret that the servers of a cluster share: it never crosses the network, and signs what does."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.machine.files import explain

MIN_CHARACTERS = 32
MAX_BYTES = 4096


class ClusterKey:
    """Signs requests to other servers, and answers to them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """That of the file, without the space around it. Raises `FieldOutOfRange`, which says nothing of the key."""
        try:
            with path.open("rb") as file:
                secret = file.read(MAX_BYTES + 1).strip()
        except OSError as error:
            raise _refusal(path, f"cannot be read: {explain(error)}") from error
        if not MIN_CHARACTERS <= len(secret) <= MAX_BYTES:
            raise _refusal(path, f"must have from {MIN_CHARACTERS} to {MAX_BYTES} characters; has {len(secret)}")
        return cls(secret)

    def sign(self, *parts: bytes) -> str:
        """A signature of the parts, in this order."""
        signature = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            signature.update(len(part).to_bytes(8, "little") + part)
        return signature.hexdigest()

    def has_signed(self, signature: str, *parts: bytes) -> bool:
        """Whether it is what `sign` returns."""
        return hmac.compare_digest(signature.encode("latin-1", "replace"), self.sign(*parts).encode())


def new_nonce() -> str:
    """A fresh random token."""
    return secrets.token_hex(16)


def _refusal(path: Path, problem: str) -> FieldOutOfRange:
    return FieldOutOfRange(f"cluster key file {path}: {problem}", param="cluster_key_file")

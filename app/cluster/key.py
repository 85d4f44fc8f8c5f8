"""The secret that the servers of a cluster share: it never crosses the network, and signs what does.

A request says whom it is for, so one for another server is worth nothing here, and it has a nonce, so an answer to one
request is worth nothing for another. Who repeats an offer cannot have it taken: that needs a word from the new answer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.machine.files import explain

MIN_CHARACTERS, MAX_BYTES = 32, 4096
SIGNATURE, NONCE, DIGEST, TO = "djinn-signature", "djinn-nonce", "djinn-body", "djinn-to"


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
            if MIN_CHARACTERS <= len(secret) <= MAX_BYTES:
                return cls(secret)
            problem = f"must have from {MIN_CHARACTERS} to {MAX_BYTES} characters; has {len(secret)}"
        except OSError as error:
            problem = f"cannot be read: {explain(error)}"
        raise FieldOutOfRange(f"cluster key file {path}: {problem}", param="cluster_key_file")

    def sign(self, *parts: bytes) -> str:
        """A signature of the parts, in this order."""
        signature = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            signature.update(len(part).to_bytes(8, "little") + part)
        return signature.hexdigest()

    def has_signed(self, signature: str, *parts: bytes) -> bool:
        """Whether it is what `sign` returns."""
        return hmac.compare_digest(signature.encode("latin-1", "replace"), self.sign(*parts).encode())


def sign_request(key: ClusterKey, to: str, path: str, body: bytes) -> dict[str, str]:
    """Headers of a request to the server of that name."""
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    return {NONCE: nonce, DIGEST: digest, TO: to, SIGNATURE: key.sign(*_request(to, path, nonce, digest))}


def is_request(key: ClusterKey, here: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a server of the cluster has signed the request for this one. Its body is still to be looked at."""
    nonce, digest = headers.get(NONCE, ""), headers.get(DIGEST, "")
    return key.has_signed(headers.get(SIGNATURE, ""), *_request(here, path, nonce, digest))


def _request(*parts: str) -> list[bytes]:
    return [b"request", *(each.encode("latin-1", "replace") for each in parts)]


def sign_answer(key: ClusterKey, headers: Mapping[str, str], status: int, body: bytes) -> str:
    """The signature of an answer to the request with such headers."""
    return key.sign(b"answer", headers.get(NONCE, "").encode("latin-1"), str(status).encode(), body)


def is_answer(key: ClusterKey, request: Mapping[str, str], status: int, body: bytes, signature: str) -> bool:
    """Whether a server of the cluster has signed that answer to the request with such headers."""
    return key.has_signed(signature, b"answer", request[NONCE].encode(), str(status).encode(), body)

"""How requests between servers and their answers are signed.

A request says whom it is for, so one for another server is worth nothing here, and it has a nonce, so an answer to one
request is worth nothing for another. Who repeats an offer cannot have it taken: that needs a word from the new answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from app.cluster.moves.key import ClusterKey, new_nonce

SIGNATURE, NONCE, DIGEST, TO = "djinn-signature", "djinn-nonce", "djinn-body", "djinn-to"


def sign_request(key: ClusterKey, to: str, path: str, body: bytes) -> dict[str, str]:
    """Headers of a request to the server of that name."""
    nonce, digest = new_nonce(), hashlib.sha256(body).hexdigest()
    return {NONCE: nonce, DIGEST: digest, TO: to, SIGNATURE: key.sign(*_request(to, path, nonce, digest))}


def is_request(key: ClusterKey, here: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a server of the cluster has signed the request for this one. Its body is still to be looked at."""
    nonce, digest = headers.get(NONCE, ""), headers.get(DIGEST, "")
    return key.has_signed(headers.get(SIGNATURE, ""), *_request(here, path, nonce, digest))


def is_body(body: bytes, headers: Mapping[str, str]) -> bool:
    """Whether it is the body of the request."""
    return hashlib.sha256(body).hexdigest() == headers.get(DIGEST)


def sign_answer(key: ClusterKey, headers: Mapping[str, str], status: int, body: bytes) -> str:
    """The signature of an answer to the request with such headers."""
    return key.sign(b"answer", headers.get(NONCE, "").encode("latin-1"), str(status).encode(), body)


def is_answer(key: ClusterKey, request: Mapping[str, str], status: int, body: bytes, signature: str) -> bool:
    """Whether a server of the cluster has signed that answer to the request with such headers."""
    return key.has_signed(signature, b"answer", request[NONCE].encode(), str(status).encode(), body)


def _request(to: str, path: str, nonce: str, digest: str) -> list[bytes]:
    return [b"request", *(each.encode("latin-1", "replace") for each in (to, path, nonce, digest))]

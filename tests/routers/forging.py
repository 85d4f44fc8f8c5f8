"""Exported files, as a bad disk or a bad client could change them."""

import hashlib
import json
import struct

import httpx
from safetensors.numpy import load

IMPORT = "/v1/sessions/import"


def imported(http: httpx.Client, content: bytes) -> str:
    """The path of the session that a file has brought."""
    return f"/v1/sessions/{http.post(IMPORT, content=content).raise_for_status().json()['id']}"


def with_about(content: bytes, about: str) -> bytes:
    """The file, as its owner could rewrite it."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    fields = json.loads(content[8:end])
    first, last = fields["about"]["data_offsets"]
    text = about.encode()
    fields["about"] |= {"shape": [len(text)], "data_offsets": [first, first + len(text)]}
    for later in ("kv", "sha256"):
        offsets = fields[later]["data_offsets"]
        fields[later]["data_offsets"] = [offset - (last - first) + len(text) for offset in offsets]
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    tensors = content[end : end + first] + text + content[end + last : -32]
    forged = struct.pack("<Q", len(header)) + header + tensors
    return forged + hashlib.sha256(forged).digest()


def with_kv_of_ones(content: bytes) -> bytes:
    """The file with KV that no model has computed, and a checksum that fits."""
    start = len(content) - 32 - load(content)["kv"].nbytes
    forged = content[:start] + b"\0\0\x80\x3f" * ((len(content) - 32 - start) // 4)
    return forged + hashlib.sha256(forged).digest()

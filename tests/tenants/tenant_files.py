"""Files of tenants, and clients with their keys."""

import json
from pathlib import Path
from typing import Any

import httpx

from app.tenants.tenant import digest


class Clock:
    """Unix seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def key(text: str, **dates: str) -> dict[str, str]:
    return {"sha256": digest(text.encode()), **dates}


def tenant(name: str, *keys: dict[str, str], role: str = "user", **limits: int) -> dict[str, Any]:
    """A tenant whose only key is its name, unless it is given others."""
    return {"name": name, "keys": list(keys) or [key(name)], "role": role, "limits": limits}


def write_tenants(path: Path, *tenants: dict[str, Any]) -> Path:
    """JSON, which is YAML too."""
    path.write_text(json.dumps({"tenants": tenants}))
    return path


def turn(http: httpx.Client, tokens: int, max_tokens: int) -> httpx.Response:
    """A turn of that many tokens in a new session."""
    session = http.post("/v1/sessions").json()["id"]
    body = {"token_ids": list(range(5, 5 + tokens)), "max_tokens": max_tokens, "ignore_eos": True}
    return http.post(f"/v1/sessions/{session}/generate", json=body)

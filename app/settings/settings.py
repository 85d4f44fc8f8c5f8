"""Every setting of the server together: the only reader of the environment (`DJINN_*`)."""

import os
from dataclasses import fields
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.domain.values import KVPolicy
from app.settings.access import AccessSettings
from app.settings.cluster import ClusterSettings
from app.settings.engine import EngineSettings
from app.settings.limits import LimitSettings
from app.settings.model import MemorySettings, ModelSettings

OF_CLIENTS = "DJINN_BASE_URL"
"""The variable that tells clients where a server is. The server ignores it."""


def variables() -> dict[str, str]:
    """The settings that the environment gives, by the names of variables without `DJINN_`, in small letters."""
    prefix = "DJINN_"
    given = {name: value for name, value in os.environ.items() if name.startswith(prefix) and name != OF_CLIENTS}
    return {name.removeprefix(prefix).lower(): value for name, value in given.items()}


# Flags are in the order of fields, and those of the last base come first.
class Settings(LimitSettings, MemorySettings, ModelSettings, ClusterSettings, AccessSettings, BaseSettings):
    """Each has a flag of `djinn serve`, and `DJINN_<NAME>` sets the same from the environment; a flag wins.

    Here are those of no group, and the rules that hold between groups.
    """

    model_config = SettingsConfigDict(env_prefix="DJINN_", frozen=True)

    park_on_tool_calls: bool = Field(
        True, description="offload a bound session whose answer calls tools, until its next call"
    )
    bind_by_prefix: bool = Field(
        False,
        description="bind OpenAI and Anthropic calls without X-Session-ID to the session whose history they continue",
    )
    strict_fields: bool = Field(
        False, description="refuse fields without effect on the OpenAI and Anthropic routes, instead of naming them"
    )
    engine_timeout_s: float = Field(
        120.0, gt=0, description="how long the engine may make no progress before the server replaces it"
    )
    engine_stuck_s: float = Field(
        60.0,
        gt=0,
        description="how long the engine may take for one layer or step before its turns fail and /ready answers 503",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="how long SIGTERM waits for running turns, and for KV on its way to disk"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_odd_variables(cls, values: dict[str, object]) -> dict[str, object]:
        """`DJINN_API_KEY` is taken for `DJINN_API_KEYS`; a variable that neither a setting nor a client reads is a
        mistake.
        """
        known = {f"DJINN_{name}".upper() for name in cls.model_fields} | {"DJINN_API_KEY", OF_CLIENTS}
        unknown = sorted(name for name in os.environ if name.startswith("DJINN_") and name.upper() not in known)
        if unknown:
            raise ValueError(f"unknown environment variable {' and '.join(unknown)}; see djinn serve --help")
        if "DJINN_API_KEY" in os.environ:
            values.setdefault("api_keys", os.environ["DJINN_API_KEY"])
        return values

    @model_validator(mode="after")
    def _a_cluster_is_whole(self) -> Self:
        if (self.peers is None) != (self.cluster_key_file is None):
            there, missing = ("peers", "cluster_key_file") if self.peers else ("cluster_key_file", "peers")
            raise ValueError(f"{there}: needs {missing} beside it")
        if self.peers is not None and self.replica is None:
            raise ValueError("peers: the server itself needs a name, replica")
        if self.peers is not None and self.state_dir is None:
            raise ValueError("peers: sessions that move must survive a restart, and state_dir is none")
        if self.peers is None and self.role != "both":
            raise ValueError("role: needs peers, which compute prompts or have them computed")
        return self

    @model_validator(mode="after")
    def _a_lease_is_of_a_folder(self) -> Self:
        if self.lease_s and not 1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s: 0 for none, or from 1 to 3600; got {self.lease_s:g}")
        if self.lease_s and self.state_dir is None:
            raise ValueError("lease_s: needs a folder to have a lease of, and state_dir is none")
        return self

    def engine(self) -> EngineSettings:
        """The engine's section: settings of the same name as they are, and those that follow from others."""
        named = {each.name for each in fields(EngineSettings)} & Settings.model_fields.keys()
        derived = {
            "weights_dir": self.cache_dir.expanduser() / "weights",
            "chunk_bytes": int(self.chunk_size),
            "kv_dir": None if self.state_dir is None else self.state_dir.expanduser() / "kv",
            "kv_policy": KVPolicy(self.kv_policy),
            "max_activation_bytes": int(self.max_activation_bytes),
        }
        return EngineSettings(**{**{name: getattr(self, name) for name in named}, **derived})

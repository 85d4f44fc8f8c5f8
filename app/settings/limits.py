"""Settings of how much there may be at once, how large it may be, and how long it may take."""

from typing import Self

from pydantic import BaseModel, ByteSize, Field, model_validator

from app.settings.engine import DRAFT_TOKENS


class LimitSettings(BaseModel):
    """Limits of turns, sessions, connections, requests and files."""

    max_step_tokens: int = Field(512, ge=1, description="most tokens computed in one step, over all sessions")
    max_running: int = Field(256, ge=1, description="most sessions in one step")
    max_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=DRAFT_TOKENS,
        description="most tokens that a session drafts from its history in one step; 0 for none (default: 7 on a CPU "
        "where that changes no token)",
    )
    max_queue: int = Field(
        1024, ge=1, description="waiting turns of one tenant, in addition to --max-running; more get 429"
    )
    max_model_len: int | None = Field(None, ge=2, description="cap on a session's tokens (default: the model's own)")
    max_sessions: int = Field(4096, ge=1, description="sessions that may be open at once")
    max_responses: int = Field(
        1024, ge=1, description="kept responses of /v1/responses; the least recently used are forgotten"
    )
    max_responses_bytes: ByteSize = Field(ByteSize(256 << 20), description="bytes of all kept responses, as JSON")
    max_connections: int | None = Field(
        None,
        ge=1,
        description="connections that clients may have open at once (default: 8192, or three quarters of the limit of "
        "open files)",
    )
    max_connections_per_address: int | None = Field(
        None, ge=1, description="open connections from one address (default: half of all, from loopback all)"
    )
    header_timeout_s: float = Field(10.0, gt=0, description="how long the header of a request may take")
    body_timeout_s: float = Field(30.0, gt=0, description="how long the body of a request may pause")
    write_timeout_s: float = Field(60.0, gt=0, description="how long a client may read nothing of an answer")
    max_request_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body")
    max_bodies_bytes: ByteSize = Field(
        ByteSize(512 << 20), description="memory for the bodies of all requests in flight, without imports"
    )
    max_import_bytes: ByteSize = Field(ByteSize(8 << 30), description="largest session file to import")
    max_spool_bytes: ByteSize = Field(ByteSize(16 << 30), description="disk for all exports and imports in flight")
    max_logprobs_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="memory for the log-probabilities of all turns in flight"
    )
    max_activation_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="host memory for checkpoints of paused turns and for captures"
    )
    disk_reserve: ByteSize = Field(
        ByteSize(256 << 20),
        description="free disk of --state-dir for the journal: Djinn deletes KV files for it, and refuses exports and "
        "imports",
    )

    @model_validator(mode="after")
    def _every_session_gets_its_token(self) -> Self:
        if self.max_running > self.max_step_tokens:
            raise ValueError(
                f"max_running ({self.max_running}) must be at most max_step_tokens ({self.max_step_tokens}): "
                "each running session decodes one token a step"
            )
        return self

    @property
    def max_turns(self) -> int:
        """Turns that may run or wait at once."""
        return self.max_running + self.max_queue

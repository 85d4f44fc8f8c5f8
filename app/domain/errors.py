"""Every error a client can see, and the one table from exception to HTTP answer."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""The OpenAI API's words for a status that has its own."""
NOT_DONE = "Djinn-Not-Done"
"""The header of answers to requests of which nothing was done, as they are for another server: says why."""


class DjinnError(Exception):
    """Base of every error that reaches a client. `message` is a sentence; `param` names the field at fault."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry_after_s: int | None = None
    """When the client should retry; None: unknown."""
    headers: Mapping[str, str] = {}
    """Other headers of the answer."""

    def __init_subclass__(
        cls,
        *,
        status: int | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        not_done: str | None = None,
        **others: Any,
    ) -> None:
        """A kind of error has what its base has, but for what it is given here. `not_done`: nothing of the request was
        done, and this is why, for the header `NOT_DONE`.
        """
        super().__init_subclass__(**others)
        if status is not None:
            cls.status = status
            cls.type = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        cls.code = code or cls.code
        cls.retry_after_s = retry_after_s or cls.retry_after_s
        if not_done is not None:
            cls.headers = MappingProxyType({NOT_DONE: not_done})

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @classmethod
    def at(cls, param: str, words: str) -> Self:
        """The error about the field `param`, which the message names first."""
        return cls(f"{param}: {words}", param=param)

    def body(self) -> dict[str, Any]:
        """The JSON body of every error answer: `{"error": {message, type, code, param}}`, as the OpenAI API has it."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}


class MalformedRequest(DjinnError, status=400, code="malformed_request"):
    """The request cannot be understood."""


class ContextTooLong(MalformedRequest, code="context_length_exceeded"):
    """More tokens than the model or the pool can hold."""

    def __init__(
        self, message: str, *, param: str | None = None, prompt: int = 0, wanted: int = 0, context: int | None = None
    ) -> None:
        """`prompt` and `wanted` tokens do not fit into `context`, if that is known."""
        super().__init__(message, param=param)
        self.prompt = prompt
        self.wanted = wanted
        self.context = context


class CompressedBody(MalformedRequest, status=415, code="compressed_body"):
    """The body is compressed."""

    headers = MappingProxyType({"Accept-Encoding": "gzip, zstd, identity"})


class Unauthenticated(DjinnError, status=401, code="invalid_api_key"):
    """No valid API key."""


class ForeignHost(DjinnError, status=403, code="foreign_host"):
    """The request is for another host, or a page of another site has sent it."""


class WrongRole(DjinnError, status=403, code="wrong_role"):
    """The caller's tenant may not do this."""


class NotFound(DjinnError, status=404, code="not_found"):
    """Not there, or not yours."""


class UnknownModel(NotFound, code="model_not_found"):
    """No such model here."""


class ThreadNotFound(NotFound, code="thread_not_found"):
    """The server does not hold that conversation of Anthropic's API: the client sends all of it again."""


class MethodNotAllowed(DjinnError, status=405, code="method_not_allowed"):
    """The path exists, but not for this method."""


class RequestTimeout(DjinnError, status=408, code="request_timeout"):
    """The client did not send the rest of its request."""


class WrongState(DjinnError, status=409, code="wrong_state"):
    """The session's state does not allow this."""


class TurnCancelled(WrongState):
    """Another request cancelled the turn, or closed its session. The header keeps the SDKs of OpenAI and Anthropic from
    retrying the 409: a retry would open a new session under the same name.
    """

    headers = MappingProxyType({"X-Should-Retry": "false"})

    def __init__(self, what: str = "turn") -> None:
        super().__init__(f"the {what} was cancelled")


class KeyReused(DjinnError, status=422, code="idempotency_key_reused"):
    """The `Idempotency-Key` has been used for another request."""


class TooLarge(DjinnError, status=413, code="request_too_large"):
    """The body is over the size limit."""


class FieldOutOfRange(DjinnError, status=422, code="field_out_of_range"):
    """One field has a value outside its range, or names a feature that is not there."""


class Restated(DjinnError):
    """An error with another status or other words; its code stays."""

    def __init__(self, error: DjinnError, *, status: int | None = None, message: str | None = None) -> None:
        super().__init__(message or error.message, param=error.param)
        self.status, self.type, self.code = status or error.status, error.type, error.code  # type: ignore[misc]
        self.retry_after_s, self.headers = error.retry_after_s, error.headers


class RefusedGrammar(FieldOutOfRange):
    """A grammar that is invalid, too large or too slow."""

    def __init__(self, message: str, *, param: str, odd: Sequence[str]) -> None:
        """`odd` are the fields of those of its parts that are refused alone too."""
        super().__init__(message, param=param)
        self.odd = odd


class GrammarTooComplex(FieldOutOfRange, code="grammar_too_complex"):
    """A grammar that was valid, but cannot be followed any further: its turn ends."""


class DeadlyTurn(FieldOutOfRange, code="deadly_turn"):
    """The engine has died again and again while this turn was there. A client that repeats it does so in vain."""


class BeyondTenantLimit(FieldOutOfRange, code="beyond_tenant_limit"):
    """One call asks for more than its tenant may ever have. A client that repeats it does so in vain."""


class NoCluster(DjinnError, status=409, code="no_cluster"):
    """The server knows of no others."""


class UnknownReplica(FieldOutOfRange, code="unknown_replica"):
    """No server of the cluster has that name."""


class AlreadyThere(DjinnError, status=409, code="already_there"):
    """The session is at home where it was to move."""


class Moving(WrongState, code="moving", retry_after_s=1, not_done="moving"):
    """The session is on its way to another server, or about to be. Nothing of the request was done; carries
    Retry-After.
    """


class Moved(DjinnError, status=421, code="moved"):
    """The session is at home on another server, which the header `Djinn-Home` names: there the same request can be
    made. Nothing of it was done.
    """

    def __init__(self, message: str, *, home: str) -> None:
        """`home` is the name of the server, and its URL if it is known."""
        super().__init__(message)
        self.headers = {"Djinn-Home": home}


class PeerAway(DjinnError, status=503, code="peer_away", retry_after_s=5):
    """The other server does not answer. The session stays; carries Retry-After."""


class PeerFull(DjinnError, status=503, code="peer_full", retry_after_s=5):
    """The other server has no room for the session, which stays; carries Retry-After."""


class NameTaken(DjinnError, status=409, code="name_taken"):
    """On the other server the same tenant calls another session by the name of this one. The session stays."""


class PeerMismatch(DjinnError, status=409, code="peer_mismatch"):
    """The other server runs another model, or another version, or has other tenants. The session stays."""


class PeerStranger(DjinnError, status=502, code="peer_stranger"):
    """One of the two servers has not the key of the cluster, or another. The session stays."""


class MoveUnsettled(DjinnError, status=503, code="move_unsettled", retry_after_s=5):
    """The other server may have taken the session. This server asks until it answers. Neither serves it meanwhile."""


class BadAdapter(FieldOutOfRange, code="bad_adapter"):
    """A LoRA adapter that cannot be read, or is not for this model."""


class AdaptersFull(FieldOutOfRange, code="adapters_full"):
    """The LoRA adapters take as much memory as they may."""


class UploadsFull(FieldOutOfRange, code="uploads_full"):
    """The dictionaries, lenses and probes take as much memory as they may."""


class UploadInUse(DjinnError, status=409, code="upload_in_use"):
    """The engine needs the dictionary for what sessions have armed, for their histories, or for a job. It stays."""


class UploadMissing(WrongState, code="upload_not_loaded"):
    """A dictionary that the session's breakpoints or its history need is not loaded. The session stays as it is."""


class AdapterMissing(WrongState, code="adapter_not_loaded"):
    """The LoRA adapter that the session's history is computed with is not loaded. The session stays as it is."""


class BadExport(FieldOutOfRange, code="bad_export"):
    """An exported session that is damaged, or not of this model."""


class Busy(DjinnError, status=429, code="queue_full"):
    """The queue is full; carries Retry-After."""

    def __init__(self, message: str, *, retry_after_s: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class SessionLimit(Busy, code="session_limit"):
    """As many sessions are open as may be."""

    def __init__(self, reason: str, *, retry_after_s: int) -> None:
        super().__init__(
            f"{reason}: close some with DELETE /v1/sessions/{{id}}, or create them with ttl_s so that they close by "
            "themselves",
            retry_after_s=retry_after_s,
        )


class TenantLimit(Busy, code="tenant_limit"):
    """The tenant has as many turns or sessions as it may have."""


class StreamLimit(Busy, code="stream_limit"):
    """As many event streams are open as may be."""


class RateLimited(Busy, code="rate_limit_exceeded"):
    """The tenant has used up its minute."""


class Draining(DjinnError, status=503, code="draining", retry_after_s=5, not_done="draining"):
    """The server is shutting down, and has done nothing of the request; carries Retry-After."""


class SpoolFull(Busy, code="spool_full"):
    """As many exports and imports are under way as may be, or they take as much of the disk as they may."""


class ActivationsFull(Busy, code="activations_full"):
    """The checkpoints of paused turns and the captures take as much memory as they may."""


class LogprobsFull(Busy, code="logprobs_full"):
    """The log-probabilities that turns under way report take as much memory as they may."""


class FilesFull(FieldOutOfRange, code="files_full"):
    """The kept files are as many, or as large, as they may be."""


class DiskShort(DjinnError, status=503, code="disk_full"):
    """Not done: the disk has no room for the file."""


class JournalUnavailable(DjinnError, status=503, code="journal_unavailable"):
    """Not done: the journal cannot be written, so it would not survive a restart; or the history cannot be read."""


class Fenced(DjinnError, status=503, code="fenced", retry_after_s=2):
    """The server has no lease of its state folder, and another one may have its sessions. Whether the request was done
    is not known if it had begun before; carries Retry-After.
    """


class TooManyConnections(DjinnError, status=503, code="connection_limit"):
    """As many connections are open as may be."""


class BodiesFull(DjinnError, status=503, code="bodies_full", retry_after_s=1):
    """Not done: the bodies of requests under way take as much memory as they may; carries Retry-After."""


class ReplicaAway(DjinnError, status=503, code="replica_away", retry_after_s=2):
    """Not done: the replica that has what the request is about does not answer; carries Retry-After."""


class ReplicaLost(DjinnError, status=502, code="replica_lost"):
    """The replica went away in the middle: whether the request was done is not known."""


class ReplicaMoving(DjinnError, status=503, code="moving_on", retry_after_s=1):
    """Not done: the session has moved, and the request could not be sent after it; carries Retry-After."""


class DirectoryAway(DjinnError, status=503, code="directory_away", retry_after_s=2):
    """Not done: only the cluster's directory knows whom the request is for, and it is away; carries Retry-After."""


class NotDurable(DjinnError, code="not_durable"):
    """Done, but not written down: a restart would undo it, unless the journal can be written before. To repeat it would
    do it twice.

    `reason` is why, `done` what has been done. `turn` is the answer of a turn that is over, which the body has too.
    """

    def __init__(
        self, reason: str, *, done: str = "done, but a restart would undo it", turn: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{done}: {reason}")
        self.reason = reason
        self._turn = turn

    def body(self) -> dict[str, Any]:
        """`{"error": ...}`, and the turn if there is one."""
        return super().body() if self._turn is None else {**super().body(), "turn": self._turn}


class EngineError(DjinnError, code="engine_error"):
    """A bug or a device failure."""


class EngineAway(DjinnError, status=503, retry_after_s=2):
    """The engine takes nothing now; carries Retry-After."""


class EngineRestarting(EngineAway, code="engine_restarting"):
    """The engine has died, and another is started. Nothing of the request was done."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is being started again, repeat the request in a few seconds: {reason}")


class ServerRestarted(DjinnError, status=503, code="server_restarted"):
    """The server was killed while the turn was paused, and has been started again."""

    def __init__(self) -> None:
        super().__init__("the server was started again, and the turn that was paused is lost")


class EngineStalled(EngineAway, code="engine_stalled"):
    """The engine lives, but makes no progress. A turn that has failed with this has left its session as it was.

    `refused`: the engine was not even asked, so another replica may do the request.
    """

    def __init__(self, reason: str, *, refused: bool) -> None:
        super().__init__(f"the engine makes no progress, retry in a few seconds: {reason}")
        if refused:
            self.headers = MappingProxyType({NOT_DONE: "stalled"})


class WeightsLost(EngineError, code="weights_lost"):
    """Weights that are streamed cannot be read any more, or are not what was stored."""

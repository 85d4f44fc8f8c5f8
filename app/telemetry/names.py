"""Every name in a trace: of spans, of events, of attributes.

`gen_ai.*` and `error.type` are from OpenTelemetry's semantic conventions 1.41.1. Since 1.42.0 those for GenAI have a
repository of their own, open-telemetry/semantic-conventions-genai, without a release yet. None of them is stable.
`gen_ai.server.time_to_first_token` is the name of a metric there; here it is an attribute, in the metric's unit.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"

OPERATION = "gen_ai.operation.name"
CHAT, TEXT_COMPLETION = "chat", "text_completion"
PROVIDER = "gen_ai.provider.name"
DJINN = "djinn"
REQUEST_MODEL = "gen_ai.request.model"
CONVERSATION = "gen_ai.conversation.id"
MAX_TOKENS = "gen_ai.request.max_tokens"
SEED = "gen_ai.request.seed"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
"""Seconds from submit. A turn that paused before its first token has none."""
ERROR_TYPE = "error.type"
"""The `code` of the error. Its message may have a part of what a client wrote."""

REQUEST_ID = "djinn.request.id"
TENANT = "djinn.tenant"
KV_TIER = "djinn.kv.tier"
"""Where the KV was when the turn began."""
RECOMPUTED_TOKENS = "djinn.usage.recomputed_tokens"
PAUSES = "djinn.turn.pauses"

QUEUE, RESTORE, PREFILL, DECODE, PAUSE = "queue", "restore", "prefill", "decode", "pause"
"""Parts of a turn, as spans of their own. `restore` is the part of `queue` that the KV's way back took."""
PAUSE_LAYER = "djinn.pause.layer"
PAUSE_FIRST, PAUSE_END = "djinn.pause.first_position", "djinn.pause.end_position"
PAUSE_PASS = "djinn.pause.pass"
PAUSE_BREAKPOINT = "djinn.pause.breakpoint"

FIRST_TOKEN, KV_MOVE, RESUME = "djinn.first_token", "djinn.kv.move", "djinn.resume"
"""Events of a turn."""
KV_FROM, KV_TO = "djinn.kv.from", "djinn.kv.to"
KV_BYTES = "djinn.kv.bytes"
"""That have left or reached the device since the event before."""
RESUME_BY = "djinn.resume.by"
BY_REQUEST, BY_TIMEOUT = "request", "timeout"
NO_TIER = "none"

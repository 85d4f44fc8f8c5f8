"""The fields that clients of other servers send and that have no effect here, and what a call with one gets."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field without effect. With a `reason`, a call that asks for it is refused; else it is answered.

    Null and the `neutral` values ask for nothing.
    """

    neutral: tuple[object, ...] = ()
    reason: str | None = None

    def asks_for(self, value: object) -> bool:
        """Whether `value` asks for something."""
        return value is not None and value not in self.neutral


TEXT_ONLY = "the models here read and write text"
NO_FORM = "the answer would not have that form"
DEPRECATED = "deprecated in favour of tools, and not supported"
OWN_TEMPLATE = "a chat is written in the model's own template"

ANTHROPIC = "anthropic"
"""The place of the bodies of Anthropic's API."""
RESPONSES = "responses"
"""The place of the bodies of `/v1/responses`."""

UNSUPPORTED: dict[str, dict[str, Unsupported]] = {
    "": {
        "add_generation_prompt": Unsupported((True,), OWN_TEMPLATE),
        "allowed_token_ids": Unsupported((), "use logit_bias"),
        "audio": Unsupported((), TEXT_ONLY),
        "bad_words": Unsupported(([],), "use logit_bias"),
        "best_of": Unsupported((1,), "every generated choice is returned; use n"),
        "chat_template": Unsupported((), OWN_TEMPLATE),
        "continue_final_message": Unsupported((False,), OWN_TEMPLATE),
        "documents": Unsupported(([],), OWN_TEMPLATE),
        "echo": Unsupported((False,), "only /v1/completions repeats the prompt"),
        "function_call": Unsupported(("none", "auto"), DEPRECATED),
        "functions": Unsupported(([],), DEPRECATED),
        "grammar": Unsupported(("",), NO_FORM),
        "guided_choice": Unsupported((), NO_FORM),
        "guided_grammar": Unsupported((), NO_FORM),
        "guided_json": Unsupported((), NO_FORM),
        "guided_regex": Unsupported((), NO_FORM),
        "include_stop_str_in_output": Unsupported((False,), "the text ends before the stop string"),
        "json_schema": Unsupported((), NO_FORM),
        "modalities": Unsupported((["text"],), TEXT_ONLY),
        "prediction": Unsupported((), "the server takes no predicted text"),
        "prompt_embeds": Unsupported((), "a prompt is a text or token ids"),
        "prompt_logprobs": Unsupported((), "use echo and logprobs of /v1/completions"),
        "response_format": Unsupported(({"type": "text"},), NO_FORM),
        "skip_special_tokens": Unsupported((True,), "the text has no special tokens; use return_token_ids"),
        "suffix": Unsupported(("",), "text cannot be generated in front of other text"),
        "truncate_prompt_tokens": Unsupported((), "the server never shortens a prompt"),
        "use_beam_search": Unsupported((False,), "tokens are sampled one by one"),
        "web_search_options": Unsupported((), "the server cannot search the web"),
        "cache_prompt": Unsupported((True,)),
        "cache_salt": Unsupported(),
        "chat_template_kwargs": Unsupported(({},)),
        "id_slot": Unsupported((-1,)),
        "metadata": Unsupported(({},)),
        "priority": Unsupported((0,)),
        "prompt_cache_key": Unsupported(),
        "prompt_cache_retention": Unsupported(),
        "reasoning_effort": Unsupported(("none",)),
        "request_id": Unsupported(),
        "safety_identifier": Unsupported(),
        "service_tier": Unsupported(("auto", "default")),
        "store": Unsupported((False,)),
        "timings_per_token": Unsupported((False,)),
        "verbosity": Unsupported(("medium",)),
    },
    "stream_options": {
        "continuous_usage_stats": Unsupported(),
        "include_obfuscation": Unsupported((False,), "events are never padded"),
    },
    "messages": {
        "annotations": Unsupported(([],)),
        "audio": Unsupported((), TEXT_ONLY),
        "function_call": Unsupported((), DEPRECATED),
        "name": Unsupported(),
        "reasoning": Unsupported(("",)),
        "reasoning_content": Unsupported(("",)),
    },
    "messages.content": {"cache_control": Unsupported()},
    "messages.tool_calls": {"index": Unsupported()},
    ANTHROPIC: {
        "cache_control": Unsupported(),
        "container": Unsupported((), "the server runs no code"),
        "context_management": Unsupported(({},)),
        "diagnostics": Unsupported(({},)),
        "inference_geo": Unsupported(),
        "mcp_servers": Unsupported(([],), "the server calls no tools"),
        "service_tier": Unsupported(("auto", "standard_only")),
        "speed": Unsupported(("standard",)),
    },
    f"{ANTHROPIC}.output_config": {"effort": Unsupported()},
    f"{ANTHROPIC}.system": {"cache_control": Unsupported(), "citations": Unsupported(([],))},
    f"{ANTHROPIC}.tools": {
        "allowed_callers": Unsupported((["direct"],)),
        "cache_control": Unsupported(),
        "defer_loading": Unsupported((False,)),
        "eager_input_streaming": Unsupported((False, True)),
        "input_examples": Unsupported(([],)),
    },
    f"{ANTHROPIC}.messages.content": {
        "cache_control": Unsupported(),
        "caller": Unsupported(({"type": "direct"},)),
        "citations": Unsupported(([],)),
    },
    f"{ANTHROPIC}.messages.content.content": {"cache_control": Unsupported()},
    RESPONSES: {
        "context_management": Unsupported(([],), "the server never shortens a conversation"),
        "conversation": Unsupported((), "use previous_response_id"),
        "generate": Unsupported((True,), "the server cannot prepare a response without generating it"),
        "moderation": Unsupported((), "the server moderates nothing"),
        "prompt": Unsupported((), "the server keeps no prompt templates"),
        "stream_id": Unsupported((), "a connection runs one response at a time"),
        "image": Unsupported(),
        "access_programs": Unsupported(),
        "max_tool_calls": Unsupported(),
        "prompt_cache_key": Unsupported(),
        "prompt_cache_options": Unsupported(({},)),
        "prompt_cache_retention": Unsupported(),
        "reasoning": Unsupported(({},)),
        "safety_identifier": Unsupported(),
        "service_tier": Unsupported(("auto", "default")),
    },
    f"{RESPONSES}.stream_options": {"include_obfuscation": Unsupported((False,), "events are never padded")},
    f"{RESPONSES}.text": {"verbosity": Unsupported(("medium",))},
    f"{RESPONSES}.tools": {
        "allowed_callers": Unsupported((["direct"],)),
        "async": Unsupported((False,)),
        "defer_loading": Unsupported((False,)),
        "output_schema": Unsupported(),
    },
    f"{RESPONSES}.input": {
        "caller": Unsupported(({"type": "direct"},)),
        "name": Unsupported(),
        "namespace": Unsupported(),
    },
    f"{RESPONSES}.input.content": {
        "annotations": Unsupported(([],)),
        "logprobs": Unsupported(([],)),
        "prompt_cache_breakpoint": Unsupported(),
    },
}
"""By the path of the object that has them, without the indices of lists. `""` is the body itself.

A body that declares a field of one of these names supports it: then the entry says nothing about that body.
"""

NOTHING_KNOWN: dict[str, Unsupported] = {}


def asks_for(place: str, name: str, value: object) -> bool:
    """Whether the field `name` of an object at `place`, which no body declares, asks for something."""
    field = UNSUPPORTED.get(place, NOTHING_KNOWN).get(name)
    return value is not None if field is None else field.asks_for(value)

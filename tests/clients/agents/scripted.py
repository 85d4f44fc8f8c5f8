"""A model that says what a script says: a real Llama, tokenizer and chat template, so that nothing else is scripted."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, LAYERS, CONTEXT = 256, 4, 2, 131_072
STEERED = 5.0
"""The logit of the token that is to follow, for a hidden state of length 1."""

TEMPLATE = """
{%- macro cue(step) -%}<|cue{{ [step, LAST] | min if tools else LAST }}|>{%- endmacro -%}
{%- set at = namespace(step=0, is_answered=false) -%}
{%- if tools -%}<|im_start|>system
{{ tools | tojson }}
Answer with <tool_call>
{"name": ..., "arguments": ...}
</tool_call> to call one.<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- set at.is_answered = true -%}<|im_start|>assistant
{{ cue(at.step) }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}<|im_end|>
{% elif m.role == 'tool' -%}{%- set at.step = at.step + 1 -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- set said = m.content | string -%}
{%- if m.role == 'user' and SUBTASK in said or (m.role == 'assistant' or not at.is_answered) and DONE in said -%}
{%- set at.step = LAST -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{{ cue(at.step) }}{%- endif -%}
"""
"""Before each answer stands a cue, which the model goes on from: it tells how many tools have run. Subagents, and
conversations that are done or begin with a summary, are at the end of the script.
"""
SUBTASK = "Say what calc.py does."
"""The task of a subagent."""


def call(name: str, **arguments: Any) -> str:
    """A call as SmolLM2 writes one."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def write_scripted_model(folder: Path, source: Path, script: Sequence[str]) -> None:
    """Make the model in `folder`, with the tokenizer of the Transformers folder `source`.

    It answers with the next text of the script after each result of a tool, and with the last to a call without tools,
    to a subagent, and once it has said that.
    Each text is one token. Such a token's embedding is a unit vector that no layer changes, and in the head only
    the token that follows looks at it. After any other token the turn ends.
    """
    folder.mkdir()
    tokens = [token for number, text in enumerate(script) for token in (f"<|cue{number}|>", text)]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(each["id"] for each in tokenizer["added_tokens"]))
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": first + i, "content": text, **form} for i, text in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    copy(source / "tokenizer_config.json", folder)
    config = json.loads((source / "config.json").read_text())
    end = config["eos_token_id"]
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "vocab_size": first + len(tokens),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    template = TEMPLATE.strip().replace("LAST", str(len(script) - 1))
    for name, text in (("SUBTASK", SUBTASK), ("DONE", script[-1])):
        template = template.replace(name, json.dumps(text))
    (folder / "chat_template.jinja").write_text(template)
    save_file(_weights(first, len(tokens), end), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(first: int, count: int, end: int) -> dict[str, Tensor]:
    """Tokens from `first` on come in pairs: a cue, and the text after it; then the turn ends with the token `end`."""
    vocab, plain = first + count, HIDDEN - 1
    embedding, head = torch.zeros(vocab, HIDDEN), torch.zeros(vocab, HIDDEN)
    embedding[:, plain] = head[end, plain] = 1.0
    for i in range(count):
        embedding[first + i] = torch.eye(HIDDEN)[i]
        head[end if i % 2 else first + i + 1, i] = STEERED
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    width = HIDDEN // HEADS
    torch.manual_seed(0)
    for layer in range(LAYERS):
        shapes = {"q_proj": HIDDEN, "k_proj": width, "v_proj": width}
        parts = {f"self_attn.{name}": torch.randn(rows, HIDDEN) * 0.02 for name, rows in shapes.items()}
        parts |= {f"mlp.{name}": torch.randn(HIDDEN, HIDDEN) * 0.02 for name in ("gate_proj", "up_proj")}
        parts |= {"self_attn.o_proj": torch.zeros(HIDDEN, HIDDEN), "mlp.down_proj": torch.zeros(HIDDEN, HIDDEN)}
        parts |= {"input_layernorm": torch.ones(HIDDEN), "post_attention_layernorm": torch.ones(HIDDEN)}
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in parts.items()}
    return weights

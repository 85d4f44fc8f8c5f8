"""Chat templates in the form of current families: how each opens turns, thinks, calls tools and shows their answers."""

TOOLS = "{%- for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
THOUGHT = "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}"
CHATML = "<|im_start|>{{ m.role }}\nBODY<|im_end|>\n"
THINKS = CHATML.replace("BODY", THOUGHT + "BODY")
DEEPSEEK = "{% if m.role == 'user' %}<｜User｜>{% elif m.role != 'tool' %}<｜Assistant｜>{% endif %}BODY"
USER = "{% if m.role == 'user' %}"
NEMO = USER + "[INST]{% endif %}BODY" + USER + "[/INST]{% else %}</s>{% endif %}"
ANSWER = "{% if not m.tool_calls %}"
OSS = f"<|start|>{{{{ m.role }}}}{ANSWER}<|channel|>final<|message|>{{% endif %}}BODY{ANSWER}<|end|>{{% endif %}}"

NAME, JSON = "{{ f.name }}", "{{ f.arguments | tojson }}"
PAIRS, VALUE = "{%- for k, v in f.arguments | items %}", "{{ v if v is string else v | tojson }}"
COMMA = "{% if not loop.last %}, {% endif %}{% endfor %}"
HERMES = f'\n<tool_call>\n{{"name": "{NAME}", "arguments": {JSON}}}\n</tool_call>'
PARAMETERS = PAIRS + "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n{% endfor %}"
CODER = f"\n<tool_call>\n<function={NAME}>\n{PARAMETERS}</function>\n</tool_call>"
KEYS = PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n{% endfor %}"
GLM = f"\n<tool_call>{NAME}\n{KEYS}</tool_call>"
V11 = f"[TOOL_CALLS]{NAME}[ARGS]{JSON}"
BEGIN, SEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
V3 = f"{BEGIN}function{SEP}{NAME}\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V31 = f"{BEGIN}{NAME}{SEP}{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
COUNTED = f"functions.{NAME}:{{{{ loop.index0 }}}}<|tool_call_argument_begin|>{JSON}"
KIMI = f"<|tool_calls_section_begin|><|tool_call_begin|>{COUNTED}<|tool_call_end|><|tool_calls_section_end|>"
NAMED = PAIRS + '<parameter name="{{ k }}">' + VALUE + "</parameter>\n{% endfor %}"
MINIMAX = f'\n<minimax:tool_call>\n<invoke name="{NAME}">\n{NAMED}</invoke>\n</minimax:tool_call>'
TYPED = NAMED.replace('">', """" string="{{ 'true' if v is string else 'false' }}">""").replace(
    "parameter", "｜DSML｜parameter"
)
DSML = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{NAME}">\n{TYPED}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
LFM = f"<|tool_call_start|>[{NAME}({PAIRS}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA})]<|tool_call_end|>"
QUOTED = '{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}'
GEMMA_TURN = "<|turn>{{ m.role | replace('assistant', 'model') }}\nBODY<turn|>\n"
GEMMA = f"<|tool_call>call:{NAME}{{{{ '{{' }}}}{PAIRS}{QUOTED}{COMMA}{{{{ '}}' }}}}<tool_call|>"
LLAMA = """{{- '{"name": "' + f.name + '", ' }}{{- '"parameters": ' }}{{- f.arguments | tojson }}{{- '}' }}"""
HARMONY = f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{JSON}<|call|>"

_FORMS = {
    "Qwen 2.5": ("hermes", TOOLS, CHATML, HERMES),
    "Qwen 3": ("hermes+think", TOOLS, THINKS, HERMES),
    "SmolLM 3": ("hermes+think", "{%- set ns = namespace(first=true) %}{{ ns.first }}" + TOOLS, THINKS, HERMES),
    "Granite": ("hermes", "", "<|start_of_role|>{{ m.role }}<|end_of_role|>BODY<|end_of_text|>\n", HERMES),
    "Qwen 3 Coder": ("qwen3_coder", TOOLS, CHATML, CODER),
    "Qwen 3.5": ("qwen3_coder+think", TOOLS, THINKS, CODER),
    "GLM 4.5": ("glm+think", "[gMASK]<sop>", f"<|{{{{ m.role }}}}|>\n{THOUGHT}BODY", GLM),
    "DeepSeek V3": ("deepseek_v3", "", DEEPSEEK, V3),
    "DeepSeek V3.1": ("deepseek_v31+think", "{# </think> #}", DEEPSEEK, V31),
    "DeepSeek V3.2": ("deepseek_v32+think", "{# </think> #}", DEEPSEEK, DSML),
    "Kimi K2": ("kimi_k2", TOOLS, "<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>BODY<|im_end|>", KIMI),
    "MiniMax M2": ("minimax_m2+think", "", "]~b]{{ m.role }}\n" + THOUGHT + "BODY[e~[\n", MINIMAX),
    "LFM 2": ("lfm2", TOOLS, CHATML, LFM),
    "Gemma 4": ("gemma4", "{# <channel|> #}", GEMMA_TURN, GEMMA),
    "Llama 3": ("llama", "", "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\nBODY<|eot_id|>", LLAMA),
    "Mistral Nemo": ("mistral", "", NEMO, f'[TOOL_CALLS] [{{"name": "{NAME}", "arguments": {JSON}}}]'),
    "Magistral": ("mistral_v11+brackets", "{# [/THINK] #}", "[{{ m.role | upper }}]BODY", V11),
    "gpt-oss": ("harmony", "{# <|channel|>analysis #}", OSS, HARMONY),
}
"""How Djinn names the family's talk, what stands in front of all, a turn around its BODY, and a call."""


def _template(rest: str, turn: str, call: str) -> str:
    each = "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}" + call + "{%- endfor %}"
    said = "{%- if m.role == 'tool' %}{{ m.content }}{%- else %}{{ (m.content or '') | trim }}{%- endif %}"
    opening = "{%- set m = {'role': 'assistant', 'tool_calls': [0]} %}" + turn.partition("BODY")[0]
    turns = "{%- for m in messages %}" + turn.replace("BODY", said + each) + "{%- endfor %}"
    return rest + turns + "{%- if add_generation_prompt %}" + opening + "{%- endif %}"


FAMILIES = {family: (name, _template(*parts)) for family, (name, *parts) in _FORMS.items()}

"""Answers in the form that the documentation of each family shows, read as it says."""

import json
from typing import Any

import pytest

from app.text.generation import TextChunk
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.thinking import Opening
from tests.tools.test_cuts import STOPPED, Told, support_of

TEXT = {"type": "string"}
WEATHER = Tool("weather", None, {"properties": {"city": TEXT, "unit": TEXT, "days": {"type": "integer"}}})
SEARCH = Tool("search", None, {"properties": {"tags": {"type": "array", "items": TEXT}, "text": TEXT}})
USE = ToolUse((WEATHER, SEARCH), ToolMode.AUTO, frozenset({"weather", "search"}))
ROME: Any = ("weather", {"city": "Rome, IT", "unit": "celsius"})
OSLO: Any = ("weather", {"city": "Oslo"})

SHOWN: dict[str, tuple[str, str, str, list[Any]]] = {
    # https://qwen.readthedocs.io/en/latest/framework/function_call.html
    "hermes+think": (
        '<think>\nTwo cities.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome, IT", '
        '"unit": "celsius"}}\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call>",
        *("Two cities.", "", [ROME, OSLO]),
    ),
    # https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct/blob/main/chat_template.jinja
    "qwen3_coder": (
        'I look it up.\n<tool_call>\n<function=search>\n<parameter=tags>\n["a"]\n</parameter>\n<parameter=text>\n'
        "This is a value\nthat spans\nlines\n</parameter>\n</function>\n</tool_call>",
        *("", "I look it up.", [("search", {"tags": ["a"], "text": "This is a value\nthat spans\nlines"})]),
    ),
    # https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
    "llama": ('{"name": "weather", "parameters": {"city": "Rome, IT", "unit": "celsius"}}', *("", "", [ROME])),
    # https://docs.mistral.ai/capabilities/function_calling/ and mistral-common's tokenizers of versions 3, 11
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "VvvODy9mT"}]',
        *("", "", [OSLO]),
    ),
    "mistral_v11+brackets": (
        '[THINK]Which city?[/THINK][TOOL_CALLS]weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Oslo"}',
        *("Which city?", "", [OSLO]),
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall
    "deepseek_v31+think": (
        'Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"tags": []}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        *("Hm.", "", [OSLO, ("search", {"tags": []})]),
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3-0324/blob/main/tokenizer_config.json
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        *("", "", [OSLO]),
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/README.md
    "deepseek_v32+think": (
        'Hm.</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        'string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        *("Hm.", "", [("weather", {"city": "Oslo", "days": 3})]),
    ),
    # https://huggingface.co/zai-org/GLM-4.5/blob/main/chat_template.jinja
    "glm+think": (
        "\n<think>A city.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        *("A city.", "I look.", [("weather", {"city": "Oslo", "days": 3})]),
    ),
    # https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}'
        '<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{"text": "x"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        *("", "", [OSLO, ("search", {"text": "x"})]),
    ),
    # https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md
    "minimax_m2+think": (
        '<think>\nSearch.\n</think>\n\n<minimax:tool_call>\n<invoke name="search">\n<parameter name="tags">["news", '
        '"events"]</parameter>\n<parameter name="text">"OpenAI" "latest"</parameter>\n</invoke>\n'
        '<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n</minimax:tool_call>',
        *("Search.", "", [("search", {"tags": ["news", "events"], "text": '"OpenAI" "latest"'}), OSLO]),
    ),
    # https://docs.liquid.ai/docs/key-concepts/tool-use: text may follow
    "lfm2": (
        '<|tool_call_start|>[weather(city="Oslo"), search(tags=["a"])]<|tool_call_end|>Checking the weather.',
        *("", "Checking the weather.", [OSLO, ("search", {"tags": ["a"]})]),
    ),
    # https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4
    "gemma4": (
        '<|channel>thought\nA city.<channel|><|tool_call>call:weather{city:<|"|>Rome, IT<|"|>,unit:<|"|>celsius<|"|>}'
        "<tool_call|>",
        *("A city.", "", [ROME]),
    ),
    # https://developers.openai.com/cookbook/articles/openai-harmony
    "harmony": (
        "<|channel|>analysis<|message|>I need weather.<|end|><|start|>assistant<|channel|>commentary to=functions."
        'weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        *("I need weather.", "", [OSLO]),
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_answers_as_their_documentation_shows_them(name: str) -> None:
    text, thoughts, content, calls = SHOWN[name]
    opening = Opening.OPEN if text.startswith("Hm.") else Opening.FREE
    named = "gemma4+gemma4" if name == "gemma4" else name
    for units in ([text], list(text)):
        answer = support_of(named).answer(USE, has_form=False, opening=opening)
        told = Told(answer).take(*map(TextChunk, units)).ended(STOPPED)
        assert told[:2] == (content, thoughts)
        assert [(each, json.loads(arguments)) for each, arguments in told[2]] == calls

"""The pulled model, run by Transformers, answers as a model of its kind does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.model_store.export import export_model
from app.settings import Settings

pytestmark = pytest.mark.model


def test_it_knows_the_capital_of_france() -> None:
    folder = export_model("smollm2-135m-instruct", Settings().cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(prompt, max_new_tokens=16, do_sample=False)
    answer = str(tokenizer.decode(output[0, prompt.shape[1] :]))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")

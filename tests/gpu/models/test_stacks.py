"""Every stack against Transformers: the same logits, and the same hidden state at every boundary. Which models load,
and what is said of those that cannot run.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.stablelm import modeling_stablelm
from transformers.models.vaultgemma import modeling_vaultgemma

from app.domain.errors import FieldOutOfRange
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.models.stack import OwnStack
from app.gpu.state.layer_state import state_bytes
from app.gpu.weights.source import RandomWeights, TensorFormat
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.models.driving import Drive, assert_agrees
from tests.gpu.models.oracle import BY_ROWS, CASES, VOCAB, build_model, expect, save_model, tiny_config
from tests.gpu.tiny_engine import RoundingCache

CPU = torch.device("cpu")


def load(
    config: Any,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_model_len: int | None = None,
) -> LayerStack:
    model = ResolvedModel("tiny", config, folder, seed)
    return load_stack(model, device=CPU, dtype=dtype, attention=ReferenceAttention(), max_model_len=max_model_len)


def sequence(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Pair:
    """A stack, and the Transformers model with the same weights."""

    stack: LayerStack
    oracle: Any


_OTHERS = {"dots1", "minimax_m2", "gemma4, embeddings of each layer", "kimi_linear", "zamba2, embeddings read again"}
_OTHERS |= {"deepseek_v2", "glm4_moe_lite", "youtu"}
_LONG = {*BY_ROWS, *_OTHERS} - {"bloom", "llama4, chunks"}


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[pytest.mark.long] * (case in _LONG)) for case in CASES]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: str = request.param
    oracle = build_model(tiny_config(case))
    return Pair(load(tiny_config(case), save_model(oracle, tmp_path_factory.mktemp(case))), oracle)


@pytest.mark.parametrize("chunks", [[40], [7, 16, 17]], ids=["one-prefill", "chunked-prefill"])
def test_prefill_agrees_with_transformers(pair: Pair, chunks: list[int]) -> None:
    tokens = sequence(sum(chunks))
    [found] = Drive(pair.stack, [tokens]).run([{0: chunk} for chunk in chunks])
    assert_agrees(found, expect(pair.oracle, tokens))


def test_the_final_norm_alone_gives_transformers_last_hidden_state(pair: Pair) -> None:
    tokens = sequence(9)
    found = pair.oracle.get_decoder()
    decoder = found.model if found is pair.oracle else found  # Llama 4 does not tell its decoder
    expected = decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(pair.stack.normed(expect(pair.oracle, tokens).boundaries[-1]), expected)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_kv_of_a_smaller_type_is_that_of_a_cache_that_rounds(pair: Pair, kv_dtype: torch.dtype) -> None:
    """In every part of a prompt and after it, the keys and values of a step's own tokens included."""
    if state_bytes(pair.stack.states):
        pytest.skip("Transformers' cache of such a model has states too")
    if hasattr(pair.oracle.config, "kv_lora_rank") and pair.stack.kv_heads > 1:
        pytest.skip("Transformers keeps latents, and rounds those")
    tokens = sequence(40)
    [found] = Drive(pair.stack, [tokens], kv_dtype).run([{0: 7}, {0: 30}, {0: 1}, {0: 2}])
    expected, exact = expect(pair.oracle, tokens, RoundingCache(kv_dtype)), expect(pair.oracle, tokens)
    off, of_rounding = (float((each.logits - expected.logits).norm()) for each in (found, exact))
    assert off < 0.2 * of_rounding


def test_packed_decode_of_unequal_sequences_agrees_with_transformers(pair: Pair) -> None:
    sequences = [sequence(31, seed=1), sequence(12, seed=2), sequence(20, seed=3)]
    prefill = [{0: 25, 1: 6}, {0: 1, 1: 1, 2: 15}]
    decode = [{0: 1, 1: 1, 2: 1}] * 5
    found = Drive(pair.stack, sequences).run(prefill + decode)
    for tokens, result in zip(sequences, found, strict=True):
        assert_agrees(result, expect(pair.oracle, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_half_precision_stays_close(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = build_model(tiny_config(case))
    stack = load(tiny_config(case), save_model(oracle, tmp_path), dtype)
    tokens = sequence(20)
    [found] = Drive(stack, [tokens]).run([{0: 18}, {0: 1}, {0: 1}])
    assert {boundary.dtype for boundary in found.boundaries} == {dtype}
    assert found.logits.dtype == torch.float32
    assert_agrees(found, expect(oracle, tokens), tolerance=0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize("case", ["llama-tied-biased-wide-heads", "qwen3", "gpt2", "gpt_neox"])
def test_random_weights_are_those_that_the_source_gives_transformers(case: str) -> None:
    config = tiny_config(case)
    config.initializer_range = 0.2
    oracle = build_model(config)
    source = RandomWeights(7, config, TensorFormat(CPU, torch.float32))
    for name, parameter in oracle.named_parameters():
        parameter.copy_(source.take(name, tuple(parameter.shape)))
    stack = load(config, seed=7)
    [found] = Drive(stack, [sequence(20)]).run([{0: 20}])
    assert_agrees(found, expect(oracle, sequence(20)))
    assert stack.parameter_bytes == source.nbytes


@pytest.mark.parametrize(("case", "length"), [("llama", 1), ("gpt2", 0), ("gpt_neox", 129)])
def test_a_length_the_model_was_not_made_for_is_refused(case: str, length: int) -> None:
    with pytest.raises(FieldOutOfRange, match="between 2 and 128") as caught:
        load(tiny_config(case), max_model_len=length)
    assert caught.value.param == "max_model_len"


_UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": ({"model_type": "t5"}, "t5"),
    "speech": ({"model_type": "moonshine"}, "it has an encoder"),
    "sparse-attention": ({"model_type": "gpt_neox", "layer_types": ["indexed_attention"] * 3}, "of type indexed"),
}


@pytest.mark.parametrize("what", _UNSUPPORTED)
def test_an_architecture_that_cannot_run_is_refused_with_the_reason_and_the_known(what: str) -> None:
    fields, reason = _UNSUPPORTED[what]
    with pytest.raises(FieldOutOfRange, match=reason) as caught:
        load(AutoConfig.for_model(**{**CASES["llama"], **fields}))
    assert caught.value.param == "model"
    assert "llama, mamba2, " in caught.value.message


def _shrink_far_positions(monkeypatch: pytest.MonkeyPatch) -> str:
    """All frequencies of a batch change with its longest sequence."""
    rotary = modeling_gpt_neox.GPTNeoXRotaryEmbedding
    forward = rotary.forward

    def changed(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return forward(self, x, position_ids * 0.5 if position_ids.max() >= 32 else position_ids)

    monkeypatch.setattr(rotary, "forward", changed)
    return "gpt_neox"


def _hide_a_window(monkeypatch: pytest.MonkeyPatch) -> str:
    """A window that the layers do not pass on to attention."""
    windowed = partial(create_causal_mask, and_mask_function=lambda batch, head, query, key: key > query - 40)
    monkeypatch.setattr(modeling_stablelm, "create_causal_mask", windowed)
    return "stablelm, keywords dropped"


def _widen_a_window(monkeypatch: pytest.MonkeyPatch) -> str:
    """A window that is one token wider than the one that the layers pass on."""

    def widened(config: Any, **arguments: Any) -> Any:
        wider = deepcopy(config)
        wider.sliding_window += 1
        return create_sliding_window_causal_mask(wider, **arguments)

    monkeypatch.setattr(modeling_vaultgemma, "create_sliding_window_causal_mask", widened)
    return "vaultgemma"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_shows_only_in_long_sequences_is_refused(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _shrink_far_positions(monkeypatch)
    folder = save_model(build_model(tiny_config(case)), tmp_path)
    with pytest.raises(FieldOutOfRange, match=r"off by .* after 120 tokens"):
        load(tiny_config(case), folder, dtype)


@pytest.mark.parametrize("change", [_hide_a_window, _widen_a_window])
def test_a_mask_that_layers_do_not_tell_is_that_of_transformers(
    change: Callable[[pytest.MonkeyPatch], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = change(monkeypatch)
    oracle = build_model(tiny_config(case))
    [found] = Drive(load(tiny_config(case), save_model(oracle, tmp_path)), [sequence(60)]).run(
        [{0: 45}, {0: 14}, {0: 1}]
    )
    assert_agrees(found, expect(oracle, sequence(60)))


def test_the_guide_names_every_model_that_is_served() -> None:
    named = set(re.findall(r"`(\w+)`", Path("docs/models.md").read_text()))
    assert {case["model_type"] for case in CASES.values()} <= named


@pytest.mark.parametrize(
    ("model_type", "rope_type"), [("llama", "longrope"), ("phi3", "longrope"), ("olmo2", "dynamic")]
)
def test_rope_that_depends_on_the_sequence_length_is_refused(model_type: str, rope_type: str) -> None:
    factors = {"factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": rope_type, "rope_theta": 100.0, "original_max_position_embeddings": 64, **factors}
    with pytest.raises(FieldOutOfRange, match=rope_type):
        load(AutoConfig.for_model(**{**CASES["llama"], "model_type": model_type, "rope_parameters": rope}))


@pytest.mark.parametrize(
    ("case", "fields", "said"),
    [
        ("glm4_moe, groups", {"num_experts_per_tok": 5}, "num_experts_per_tok must be between 1 and 4"),
        ("glm4_moe, groups", {"n_group": 3}, "n_group must divide the 8 experts"),
        ("glm4_moe, groups", {"topk_group": 9}, "topk_group be between 1 and n_group"),
        ("deepseek_v3, latents", {"head_dim": 16}, "16 numbers of each head are to be rotated, and it has 8"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(case: str, fields: dict[str, int], said: str) -> None:
    with pytest.raises(FieldOutOfRange, match=said):
        load(AutoConfig.for_model(**{**CASES[case], **fields}))


def test_experts_may_be_in_one_tensor_and_none_may_be_missing(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    oracle = build_model(config)
    [one_by_one] = Drive(load(config, save_model(oracle, tmp_path / "one")), [sequence(20)]).run([{0: 20}])
    state = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    (tmp_path / "all").mkdir()
    save_file(state, tmp_path / "all" / "model.safetensors")
    [fused] = Drive(load(config, tmp_path / "all"), [sequence(20)]).run([{0: 20}])
    assert torch.equal(fused.logits, one_by_one.logits)
    config.num_experts = 5
    with pytest.raises(BrokenModel, match=r"gate\.weight.*is \(4, 48\), must be \(5, 48\)"):
        load(config, tmp_path / "one")


def test_a_field_that_own_layers_do_not_read_is_left_to_transformers_modules(tmp_path: Path) -> None:
    config = tiny_config("gemma3")
    assert isinstance(load(config), OwnStack)
    config.attn_logit_softcapping = 0.5
    oracle = build_model(config)
    stack = load(config, save_model(oracle, tmp_path))
    assert not isinstance(stack, OwnStack)
    [found] = Drive(stack, [sequence(20)]).run([{0: 20}])
    assert_agrees(found, expect(oracle, sequence(20)))


def test_experts_need_no_other_that_all_tokens_visit() -> None:
    assert isinstance(load(AutoConfig.for_model(**{**CASES["dots1"], "n_shared_experts": None})), OwnStack)


_DIVIDED = dict.fromkeys(("qwen3_next", "qwen3_5"), "linear_num_key_heads must divide linear_num_value_heads, 4")
_DIVIDED |= {"bamba": "mamba_n_groups must divide mamba_n_heads, 8"}


@pytest.mark.parametrize("case", _DIVIDED)
def test_heads_that_key_heads_do_not_divide_are_refused(case: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"{_DIVIDED[case]}; got 3"):
        load(AutoConfig.for_model(**{**CASES[case], _DIVIDED[case].split()[0]: 3}))


_SEEING = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 48}


@pytest.mark.parametrize(
    ("kind", "case"), [("qwen3_5", "qwen3_5"), ("gemma3", "gemma3"), ("mistral3", "mistral-window")]
)
def test_the_text_model_of_one_that_sees_images_runs_on_own_layers(kind: str, case: str, tmp_path: Path) -> None:
    seeing = {**_SEEING, "num_heads": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, text_config={**CASES[case]}, vision_config=seeing, tie_word_embeddings=False)
    oracle = build_model(config, AutoModelForImageTextToText)
    stack = load(config, save_model(oracle, tmp_path))
    assert isinstance(stack, OwnStack)
    [found] = Drive(stack, [sequence(20)]).run([{0: 19}, {0: 1}])
    torch.testing.assert_close(found.logits, oracle(input_ids=sequence(20)[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_transformers_modules_need_all_their_weights_and_no_others(tmp_path: Path) -> None:
    oracle = build_model(tiny_config("gpt_neox"))
    state = oracle.state_dict()
    lost = state.pop(name := "gpt_neox.layers.1.mlp.dense_h_to_4h.weight")
    with pytest.raises(BrokenModel, match=r"layers\.1\.mlp\.dense_h_to_4h"):
        load(oracle.config, save_model(oracle, tmp_path / "missing", state_dict=state))
    with pytest.raises(BrokenModel, match=r"dense_h_to_4h\.weight' in .* not finite as float32"):
        load(oracle.config, save_model(oracle, tmp_path / "odd", state_dict={**state, name: lost / 0}))
    state |= {name: lost, "gpt_neox.extra": torch.ones(3)}
    with pytest.raises(BrokenModel, match=r"gpt_neox\.extra"):
        load(oracle.config, save_model(oracle, tmp_path / "left", state_dict=state))
    (tmp_path / "left" / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(BrokenModel, match=str(tmp_path)):
        load(oracle.config, tmp_path / "left")

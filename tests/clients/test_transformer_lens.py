"""`djinn.transformer_lens` against TransformerLens itself, on the same weights of GPT-2's shape."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformer_lens", reason="make setup-dev installs it")

from transformer_lens import HookedTransformer, HookedTransformerConfig, patching
from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights
from transformers import GPT2Config, GPT2LMHeadModel

from client.errors import InvalidRequest
from client.transformer_lens import Edits, HookedDjinn
from tests.hugging_face import byte_tokenizer
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its 4.0 goes on with another class

LAYERS, HEADS, WIDTH, VOCAB = 3, 4, 32, 320
TOKENS = torch.tensor([[5, 17, 9, 30, 41, 8, 99], [7, 3, 12, 30, 44, 8, 100]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = GPT2Config(
            n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCAB, n_positions=128, initializer_range=0.2
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    byte_tokenizer(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """TransformerLens's own model."""
    original: Any = GPT2LMHeadModel.from_pretrained(folder)
    config: Any = HookedTransformerConfig(
        n_layers=LAYERS, d_model=WIDTH, n_ctx=128, d_head=WIDTH // HEADS, n_heads=HEADS, d_vocab=VOCAB,
        d_mlp=4 * WIDTH, act_fn="gelu_new", normalization_type="LN", eps=1e-5, device="cpu",
    )  # fmt: skip
    model: Any = HookedTransformer(config)
    model.load_state_dict(convert_gpt2_weights(original, config), strict=False)
    return model.eval()


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[HookedDjinn]:
    with serve(model=str(folder), max_model_len=128) as url:
        model = HookedDjinn(url)
        with model.client:
            yield model


def test_a_cache_has_the_names_shapes_and_numbers_of_transformer_lens(ours: HookedDjinn, theirs: Any) -> None:
    with torch.inference_mode():
        logits, cache = theirs.run_with_cache(TOKENS)
    found_logits, found = ours.run_with_cache(TOKENS)
    torch.testing.assert_close(found_logits, logits, atol=1e-4, rtol=1e-4)
    common = [name for name in ours.hook_names if name in cache]
    assert len(common) == 12 * LAYERS
    own = [f"blocks.{layer}.{each}" for layer in range(LAYERS) for each in ("attn_in", "mlp_in")]
    assert set(found) - set(cache) == {"embed", "final_norm", *own}
    for name in common:
        torch.testing.assert_close(found[name], cache[name], atol=1e-4, rtol=1e-4, msg=name)
    torch.testing.assert_close(found["pattern", 1], cache["pattern", 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.accumulated_resid(), cache.accumulated_resid(), atol=1e-4, rtol=1e-4)
    _, few = ours.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_z"), return_type=None)
    assert list(few) == [f"blocks.{layer}.attn.hook_z" for layer in range(LAYERS)]
    torch.testing.assert_close(
        ours(TOKENS, return_type="loss"), theirs(TOKENS, return_type="loss"), atol=1e-4, rtol=1e-4
    )


def lose_head(z: Tensor, hook: Any) -> Tensor:
    z[:, :, 1] = 0
    return z


def swap_prompts(found: Tensor, hook: Any) -> Tensor:
    assert hook.layer() == 1
    return torch.cat([found[:, :3], found.flip(0)[:, 3:]], dim=1)


HOOKS: dict[str, list[tuple[Any, Any]]] = {
    "in place": [("blocks.0.attn.hook_z", lose_head)],
    "several": [
        ("blocks.2.hook_resid_pre", lambda found, hook: found * 0.5),
        ("blocks.1.hook_resid_mid", swap_prompts),
        (lambda name: name.endswith("mlp.hook_post"), lambda found, hook: found.clamp(max=0.5)),
    ],
    "heads": [("blocks.1.attn.hook_q", lose_head), ("blocks.2.attn.hook_v", lose_head)],
    "outputs": [(f"blocks.{at}", lambda found, hook: -found) for at in ("0.hook_attn_out", "1.hook_mlp_out")],
    "first": [("blocks.0.hook_resid_pre", lambda found, hook: found.flip(-1))],
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_of_python_change_what_they_change_there(ours: HookedDjinn, theirs: Any, hooks: str) -> None:
    with torch.inference_mode():
        expected = theirs.run_with_hooks(TOKENS, fwd_hooks=HOOKS[hooks])
        plain = theirs(TOKENS)
    found = ours.run_with_hooks(TOKENS, fwd_hooks=HOOKS[hooks])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 1e-2
    with ours.hooks(HOOKS[hooks]), theirs.hooks(HOOKS[hooks]), torch.inference_mode():
        _, cache = ours.run_with_cache(TOKENS, names_filter="blocks.2.hook_resid_post")
        _, wanted = theirs.run_with_cache(TOKENS, names_filter="blocks.2.hook_resid_post")
    torch.testing.assert_close(cache["resid_post", 2], wanted["resid_post", 2], atol=1e-4, rtol=1e-4)
    assert not list(ours.client.sessions.list())


def test_an_edit_in_data_is_the_hook_and_a_pattern_is_only_looked_at(ours: HookedDjinn, theirs: Any) -> None:
    seen: list[Tensor] = []
    name = "blocks.2.attn.hook_pattern"
    hooks: list[Any] = [("blocks.0.attn.hook_z", lose_head), (name, lambda pattern, hook: seen.append(pattern))]
    with torch.inference_mode():
        expected = theirs.run_with_hooks(TOKENS, fwd_hooks=hooks)
    edits: list[Any] = [("blocks.0.attn.hook_z", Edits(ablate=True, heads=[1])), hooks[1]]
    torch.testing.assert_close(ours.run_with_hooks(TOKENS, fwd_hooks=edits), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-5)
    refused: list[list[Any]] = [[(name, lambda pattern, hook: pattern * 0)], [("blocks.9.hook_z", lose_head)]]
    for wrong in refused:
        with pytest.raises(InvalidRequest):
            ours.run_with_hooks(TOKENS, fwd_hooks=wrong)
    with pytest.raises(InvalidRequest, match="stop_at_layer"):
        ours.run_with_cache(TOKENS, stop_at_layer=1)
    assert ours.to_tokens("a cat").tolist() == [list(ours.client.tokenize("a cat"))]
    assert ours.to_str_tokens(torch.tensor([97, 98])) == ours.to_string(torch.tensor([[97], [98]])) == ["a", "b"]
    assert ours.get_token_position("b", torch.tensor([98, 97, 98]), mode="last") == 2
    with pytest.raises(AttributeError, match="weights stay"):
        ours.W_U  # noqa: B018


def test_the_notebooks_heads_are_those_that_transformer_lens_finds(ours: HookedDjinn, theirs: Any) -> None:
    """Induction by pattern, and the name mover by TransformerLens's own sweep, run on both, and by the server's."""
    clean, corrupted = TOKENS[:1], TOKENS[1:]
    twice, second = clean.repeat(1, 2), torch.arange(7, 14)
    induction, movers = [], []
    for model in (theirs, ours):
        with torch.no_grad():
            _, cache = model.run_with_cache(twice)
            patterns = torch.stack([cache["pattern", layer][0] for layer in range(LAYERS)])
            induction.append(patterns[:, :, second, second - 6].mean(-1))
            _, cache = model.run_with_cache(clean)
            swept = patching.get_act_patch_attn_head_out_all_pos(
                model, corrupted, cache, lambda logits: logits[0, -1, 30] - logits[0, -1, 41]
            )
            movers.append(swept)
    torch.testing.assert_close(induction[1], induction[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(movers[1], movers[0], atol=1e-4, rtol=1e-4)
    ids = clean[0].tolist(), corrupted[0].tolist()
    [table] = ours.client.patching(*ids, answer=30, wrong=41, points=["z"], by="head").tables
    torch.testing.assert_close(torch.tensor(table.values), movers[0], atol=1e-4, rtol=1e-4)
    with ours.client.sessions.create() as session, torch.no_grad():
        for point in ("resid_post", "z"):
            session.capture_at(layers=range(LAYERS), point=point)
        session.generate(token_ids=ids[0], max_tokens=0)
        found = [unit.value for place in session.attribution((30, 41)).units for unit in place.units]
        _, cache = theirs.run_with_cache(clean)
        wanted = cache.logit_attrs(cache.stack_head_results(pos_slice=-1), 30, 41, pos_slice=-1)
    torch.testing.assert_close(torch.tensor(found), wanted[:, 0], atol=1e-4, rtol=1e-4)

"""Lenses of all kinds and measures, and of two sessions, against Transformers' norm and head on the same streams."""

from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import save
from torch import Tensor

from tests.errors import assert_error
from tests.openai.reference import Reference
from tests.routers.breakpoints.pausing import HIDDEN, arm, generate, open_session

PROMPTS, TOKENS, LAST = ([5, 17, 9, 30], [5, 17, 12, 30]), [21, 60], 3
torch.manual_seed(3)
SIZES = {"0.weight": (HIDDEN, HIDDEN), "0.bias": (HIDDEN,), "2.weight": (HIDDEN, HIDDEN), "2.bias": (HIDDEN,)}
FILE = {name: torch.randn(*size) / 10 for name, size in SIZES.items()}


def watched(http: httpx.Client, prompt: list[int]) -> tuple[str, list[Tensor]]:
    """A session that has captured all layers, and what it has of each, `[positions, width]`."""
    session = open_session(http)
    arm(http, session, action="capture", layers=[0, 1, 2, LAST])
    generate(http, session, token_ids=prompt, max_tokens=0)
    found = load(http.get(f"{session}/captures").content)
    return session, [torch.from_numpy(each.copy()) for _, each in sorted(found.items())]


def apart(one: Tensor, other: Tensor) -> Any:
    return pytest.approx((one.exp() * (one - other)).sum(-1).tolist(), abs=1e-3)


@pytest.mark.parametrize("kind", [None, "tuned", "jacobian"])
def test_a_lens_says_what_norm_and_head_make_of_its_streams(
    http: httpx.Client, reference: Reference, kind: str | None
) -> None:
    (session, kept), (other, there) = (watched(http, prompt) for prompt in PROMPTS)
    query: dict[str, Any] = {"positions": "all", "top_k": 2, "tokens": "21,60", "measures": True}
    layers = [0, 1, 2, LAST]
    if kind is not None:
        for file, answer in ((FILE | {"2.bias": torch.full((HIDDEN,), torch.nan)}, 422), (FILE, 201)):
            sent = http.post("/v1/lenses", data={"name": "mine", "kind": kind}, files={"weights": save(file)})
            assert sent.status_code == answer
        query, layers = {**query, "lens": "mine"}, [0, 2, LAST]
        refused = http.get(f"{session}/lens", params={**query, "layers": "1"})
        assert_error(refused, 422, "field_out_of_range", param="layers")

    def said(stream: Tensor, layer: int) -> Tensor:
        if kind is not None and layer != LAST:
            made = torch.nn.functional.linear(stream, FILE[f"{layer}.weight"], FILE[f"{layer}.bias"])
            stream = made if kind == "jacobian" else stream + made
        with torch.inference_mode():
            logits: Tensor = reference.model.lm_head(reference.model.model.norm(stream))
            return logits.log_softmax(-1)

    beside = {**query, "beside": other.rpartition("/")[2]}
    found = http.get(f"{session}/lens", params=beside).raise_for_status().json()["layers"]
    assert [each["layer"] for each in found] == layers
    for layer, each in zip(layers, found, strict=True):
        here, elsewhere = said(kept[layer], layer), said(there[layer], layer)
        best, more = here.topk(2), here.exp() - elsewhere.exp()
        assert each["token_ids"] == best.indices.tolist()
        np.testing.assert_allclose(each["logprobs"], best.values, atol=1e-3)
        assert each["ranks"] == [[int((row > row[token]).sum()) for token in TOKENS] for row in here]
        np.testing.assert_allclose(each["chosen_logprobs"], here[:, TOKENS], atol=1e-3)
        assert each["entropies"] == pytest.approx(torch.distributions.Categorical(logits=here).entropy(), abs=1e-3)
        assert each["divergences"] == apart(said(kept[LAST], LAST), here)
        assert each["beside_divergences"] == apart(here, elsewhere)
        most = more[2:].abs().topk(2).indices  # before, both are one prompt
        assert each["changed_token_ids"][2:] == most.tolist()
        np.testing.assert_allclose(each["changes"][2:], more[2:].gather(1, most), atol=1e-3)
    assert_error(http.get(f"{session}/lens", params={"beside": "ses_0"}), 404, "not_found", param="beside")
    for what in ("lens", "attribution"):
        refused = http.get(f"{session}/{what}", params={"tokens": "1,9999"})
        assert_error(refused, 422, "field_out_of_range", param="tokens")
    for path in (session, other, *(["/v1/lenses/mine"] if kind else [])):
        http.delete(path).raise_for_status()

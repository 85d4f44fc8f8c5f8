"""What `--weights-dtype` and `--kv-dtype` lose: `python -m benchmarks.rounding`. A minute on a CPU.

The model reads real text, as it would a prompt, and says after each token how likely every next one is. Each setting is
held against the model with its checkpoint's weights and KV in float32. All of it computes in float32, so what is seen
is the loss of the rounding alone. float8 weights, which a CPU does not serve, are rounded as a GPU rounds them: inputs
and weights to float8, sums in float32.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from app.domain.values import WeightsDtype
from app.gpu.device.hardware import choose_kv_dtype
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kernels.linear.base import Matrix, Weight, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, dequantize, quantize
from app.gpu.kv.pools import KVPool
from app.gpu.models import build_stack
from app.gpu.models.base import LayerStack
from app.gpu.weights.bundles import Bundle, ResidentWeights
from app.gpu.weights.checkpoint import weights_of
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import Settings
from benchmarks.measuring import TokenSource, read_text_tokens
from loadgen.options.common import EXIT_OK
from loadgen.report.tables import Table, to_rich

CPU, FLOAT32, BLOCK = torch.device("cpu"), torch.float32, 16
CHOICES = [
    *((weights, "float32") for weights in ("bfloat16", "int8", "float8")),
    *(("checkpoint", kv) for kv in ("bfloat16", "float16", "float8")),
    ("int8", "float8"),
    ("float8", "float8"),
]


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one setting over all tokens. `kl` is the mean Kullback-Leibler divergence of the next token's distribution
    from that in float32, in nats; `perplexity` that of the text, over float32's; `agreement` the share of tokens after
    which both have the same most likely one.
    """

    kl: float
    perplexity: float
    agreement: float


class Float8OnCpu:
    """A dense layer whose inputs and weights are float8, and whose sums are float32: see `Linear`."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None, experts: int = 1) -> None:
        if experts > 1:
            raise ValueError("float8 is measured on models without experts")
        self.out_features, self.in_features = weight.shape
        self.weights = [Weight(each) for each in (dense_of(weight), bias) if each is not None]

    def __call__(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        return F.linear(dequantize(FLOAT8, quantize(FLOAT8, x)), *(each.tensor for each in self.weights))


class _Float8Weights(ResidentWeights):
    """Its dense layers are `Float8OnCpu`."""

    def bundle(self) -> AbstractContextManager[Bundle]:
        return nullcontext(Bundle(Float8OnCpu))


def load(model: ResolvedModel, weights: WeightsDtype) -> LayerStack:
    """The model, which computes in float32 on weights of that type."""
    kept = (_Float8Weights if weights is WeightsDtype.FLOAT8 else ResidentWeights)(CPU, FLOAT32, batch_invariant=False)
    source = weights_of(replace(model, weights_dtype=weights), CPU, FLOAT32)
    return build_stack(model, source, kept, attention_for(CPU), None)


@torch.inference_mode()
def log_probabilities(stack: LayerStack, tokens: list[int], kv: str) -> Tensor:
    """Of every next token after each of `tokens`: `[tokens, vocab]` float32."""
    blocks = range(-(-len(tokens) // BLOCK))
    pool = KVPool(stack, len(blocks), BLOCK, dtype=choose_kv_dtype(kv, FLOAT32))
    batch = make_batch([(0, len(tokens))], [blocks], BLOCK, CPU)
    hidden = stack.embed(torch.tensor(tokens), batch.positions)
    for layer in range(stack.num_layers):
        hidden = stack.layer(layer, hidden, batch, pool.layer(layer))
    return stack.head(hidden).log_softmax(-1)


def compare(found: list[Tensor], exact: list[Tensor], windows: list[list[int]]) -> Loss:
    """The loss of `found` over all windows."""
    ours, theirs = torch.cat(found), torch.cat(exact)
    kl = float(F.kl_div(ours, theirs, reduction="batchmean", log_target=True))
    nexts = [torch.tensor(tokens[1:])[:, None] for tokens in windows]
    said = [
        torch.cat([each[:-1].gather(1, after) for each, after in zip(of, nexts, strict=True)]).mean()
        for of in (exact, found)
    ]
    return Loss(kl, float((said[0] - said[1]).exp()), float((ours.argmax(1) == theirs.argmax(1)).float().mean()))


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as djinn serve takes it")
    parser.add_argument("--windows", type=int, default=4, help="pieces of text, default: 4")
    parser.add_argument("--tokens", type=int, default=512, help="of each, default: 512")
    arguments = parser.parse_args()
    model = resolve(arguments.model, cache_dir=Settings().cache_dir.expanduser())
    source = TokenSource(read_text_tokens(Path(str(model.folder))))
    windows = [source.take(arguments.tokens) for _ in range(arguments.windows)]
    exact = [log_probabilities(load(model, WeightsDtype.CHECKPOINT), tokens, "float32") for tokens in windows]
    rows = []
    for weights, kv in CHOICES:
        stack = load(model, WeightsDtype(weights))
        loss = compare([log_probabilities(stack, tokens, kv) for tokens in windows], exact, windows)
        seen = f"{loss.kl:.5f}", f"{loss.perplexity:.4f}", f"{loss.agreement:.1%}"
        header = ("--weights-dtype", "--kv-dtype", "divergence, nats", "perplexity, ratio", "same most likely token")
        rows.append(dict(zip(header, (weights, kv, *seen), strict=True)))
    note = f"{model.name}, {arguments.windows} windows of {arguments.tokens} tokens, against float32."
    Console().print(to_rich([Table("What rounding loses", rows, note)]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

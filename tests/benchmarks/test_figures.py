"""What benchmarks compute from hand-made measurements: figures and targets."""

import re
from argparse import Namespace
from pathlib import Path

import orjson
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

from app.gpu.kernels.linear.base import BlockMatrix
from app.gpu.kernels.linear.encodings import FLOAT8, quantize
from benchmarks import grammars
from benchmarks.command import finish
from benchmarks.grammars import DecodeRound as GrammarsRound
from benchmarks.grammars import Measured as GrammarsMeasured
from benchmarks.record import RESULTS
from benchmarks.rounding import Float8OnCpu, compare
from loadgen.processes.launch import ROOT

STEPS = GrammarsMeasured(
    rounds=[
        *(GrammarsRound(32, *seconds) for seconds in ((0.100, 0.104), (0.200, 0.206), (0.080, 0.090))),
        *(2 * [GrammarsRound(1, 0.020, 0.030)]),
    ],
    other_cpu_share=0.0,
)


def test_the_files_hold_every_figure_and_tell_nothing_about_folders(tmp_path: Path) -> None:
    run, note = grammars.describe("smollm2", grammars.QUICK, STEPS)
    finish(Namespace(quick=False, output=tmp_path), "grammars", "Grammars", run, note)
    (markdown,) = tmp_path.glob("grammars-*.md")
    text, written = markdown.read_text(), markdown.with_suffix(".json").read_text()
    assert all(figure.name in text and figure.value in text for figure in run.figures)
    assert len(orjson.loads(written)["figures"]) == len(run.figures)
    assert orjson.loads(written)["model"] == "smollm2"
    assert str(ROOT) not in text + written


def test_the_index_links_to_every_result_that_is_kept_and_to_nothing_that_is_gone() -> None:
    linked = set(re.findall(r"\]\(([^)]+)\)", (RESULTS / "README.md").read_text("utf-8")))
    assert {name for name in linked if not (RESULTS / name).is_file()} == set()
    assert {path.name for path in RESULTS.iterdir()} - {"README.md"} <= linked


# What rounding loses, by PyTorch's own measures.


def test_the_loss_is_that_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    exact = [torch.randn(len(each), 10, generator=generator) for each in windows]
    found = [each + torch.randn(each.shape, generator=generator) / 2 for each in exact]
    loss = compare([each.log_softmax(1) for each in found], [each.log_softmax(1) for each in exact], windows)
    theirs, ours = torch.cat(exact), torch.cat(found)
    assert loss.kl == pytest.approx(float(kl_divergence(Categorical(logits=theirs), Categorical(logits=ours)).mean()))

    def perplexity(logits: list[torch.Tensor]) -> float:
        said = torch.cat([each[:-1] for each in logits])
        return float(F.cross_entropy(said, torch.tensor([token for each in windows for token in each[1:]])).exp())

    assert loss.perplexity == pytest.approx(perplexity(found) / perplexity(exact))
    assert loss.agreement == pytest.approx(float((theirs.argmax(1) == ours.argmax(1)).double().mean()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels take no tensors of a CPU")
def test_float8_on_a_cpu_is_the_float8_of_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from app.gpu.kernels.linear import DenseLinear

    generator = torch.Generator().manual_seed(2)
    values, x = torch.randn(48, 64, generator=generator), torch.randn(5, 64, generator=generator)
    weight, bias = BlockMatrix(FLOAT8, quantize(FLOAT8, values), (48, 64)), torch.randn(48, generator=generator)
    torch.testing.assert_close(Float8OnCpu(weight, bias)(x), DenseLinear(weight, bias)(x))

"""Comparing all checksums of a file of bundles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from app.gpu.weights.bundle_file import BundleFile
from app.gpu.weights.bundle_header import Section
from app.gpu.weights.progress import Progress


def verify(file: BundleFile) -> None:
    """Read all sections, as many at a time as PyTorch has threads. Raises `WeightsLost` for one that is damaged."""

    def check(section: Section) -> int:
        before = file.state()
        file.prove(section, file.checksum(section), before)
        return section.nbytes

    progress = Progress("checked", sum(section.nbytes for section in file.sections))
    with ThreadPoolExecutor(torch.get_num_threads(), "djinn-weights-check") as pool:
        for nbytes in pool.map(check, file.sections):
            progress.add(nbytes)

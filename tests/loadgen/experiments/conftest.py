"""What the tests of all experiments share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

from loadgen.results import figures
from tests.serving import serve


@pytest.fixture(scope="module", autouse=True)
def _coarse_pictures() -> Iterator[None]:
    """To draw well takes longer than so small a run. The tests of `loadgen/results` look at the drawings themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "set_layout_engine", lambda *layout, **options: None)
        patch.setattr(figures, "PNG_DPI", 20)
        yield


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of each file's own, so that what is left on it was left by the load generator."""
    with serve() as url:
        yield url

"""What tests of the journal share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.journal.journal import Journal
from tests.journal.building import started


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A journal that writes, in `tmp_path`."""
    journal = started(tmp_path)
    yield journal
    journal.close()

"""labkit's own strategies and extras train what they say: of none may the witness say a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_is_found(runs_dir: Path) -> Iterator[None]:
    yield
    written = [json.loads(path.read_text())["findings"] for path in runs_dir.glob("**/findings.json")]
    assert [finding for findings in written for finding in findings] == []

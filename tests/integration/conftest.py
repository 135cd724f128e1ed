"""What several integration tests start from: a stand-in for Kaggle's service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.kaggle_stand_in import StandIn


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in for Kaggle's service, to which Kaggle's own client goes."""
    from integration.kaggle_stand_in import TOKEN, stand_in  # Kaggle's client is slow to import
    from kagglesdk import kaggle_env

    from labkit.kaggle import follow

    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.1)
    monkeypatch.setenv("KAGGLE_API_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))
    with stand_in(tmp_path / "kaggle") as service:
        # the client's own table of addresses; all else in it is as Kaggle made it
        monkeypatch.setitem(kaggle_env._env_to_endpoint, kaggle_env.KaggleEnv.PROD, service.url)
        yield service

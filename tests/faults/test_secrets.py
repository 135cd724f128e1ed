"""Secrets in the environment reach the ranks, and no file."""

from __future__ import annotations

from pathlib import Path

import pytest

import labkit

SENTINEL = "s3cr3t-value"
NAMES = [
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "WANDB_API_KEY",
    "KAGGLE_KEY",
    "DATABASE_URL",
    "NCCL_AUTH_KEY",
    "MY_SETTING",
]
SCRIPT = f"""
import os
import torch.distributed as dist
assert all(os.environ[name][::-1].count({SENTINEL[::-1]!r}) == 1 for name in {[*NAMES, "GIVEN_PASSWORD"]})
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    secret = os.environ["HF_TOKEN"]
    raise RuntimeError("no secret in this message")
dist.barrier()
"""


def test_planted_secrets_are_in_no_file_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_dir: Path
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, f"postgres://user:{SENTINEL}@host" if "URL" in name else SENTINEL)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    with pytest.raises(labkit.RankFailedError, match="no secret in this message"):
        labkit.launch(script, env={"GIVEN_PASSWORD": SENTINEL}, wait=True)

    run = labkit.attach("latest")
    run.report()
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SENTINEL.encode() in path.read_bytes()]
    assert SENTINEL not in repr(run)
    assert run.path.stat().st_mode & 0o077 == 0

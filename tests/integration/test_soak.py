"""Stability in figures. gloo ranks of torch 2.13 may abort at interpreter exit after a training that succeeded.

make soak        (LABKIT_SOAK=100 for another number of repeats)
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter

import pytest
from conftest import SCRIPTS
from test_launch import tiny

import labkit

REPEATS = int(os.environ.get("LABKIT_SOAK", "50"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("script", ["plain_ddp.py", "with_accelerate.py", "ddp"])
def test_launches_end_as_they_should(script, capsys):
    ends: Counter[str] = Counter()
    for _ in range(REPEATS):
        what = tiny(script) if script == "ddp" else SCRIPTS / script
        options = {"steps": 5, "global_batch_size": 8} if script == "ddp" else {}
        run = labkit.launch(what, nproc_per_node=2, args=["20"] if "plain" in script else [], wait=False, **options)
        try:
            ends[run.wait(120).state] += 1
        except labkit.RankFailedError as error:
            ends[str(error).splitlines()[0]] += 1
    with capsys.disabled():
        print(f"\n{script}: {REPEATS} launches on 2 ranks: {dict(ends)}")
    assert ends == {"succeeded": REPEATS}


def test_our_scripts_end_cleanly_under_bare_torchrun(tmp_path, capsys):
    path = tiny("ddp").write(tmp_path / "ddp.py")
    command = ["torchrun", "--standalone", "--nproc-per-node=2", str(path), "--steps", "3", "--global-batch-size", "8"]
    codes = Counter(subprocess.run(command, capture_output=True, timeout=120).returncode for _ in range(REPEATS))
    with capsys.disabled():
        print(f"\nddp.py under bare torchrun: {REPEATS} launches on 2 ranks, exit codes: {dict(codes)}")
    assert codes == {0: REPEATS}

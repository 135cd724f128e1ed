"""A program whose folder is on the first of two hosts only: what it needs beside it travels in the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.namespaces import TwoHosts, needs_hosts

from labkit.record import State
from labkit.stored_runs import list_runs

pytestmark = needs_hosts

TRAIN = """\
import csv, os, sys
import torch
import torch.distributed as dist
from nets.model import WIDTH

dist.init_process_group("gloo")
total = torch.tensor(sum(float(row[0]) for row in csv.reader(open("data/values.csv"))))
dist.all_reduce(total)
print(f"{total:.0f} {WIDTH} {sys.argv[1:]}", flush=True)
if "boom" in sys.argv and dist.get_rank() == 1:
    raise ValueError("boom")
dist.destroy_process_group()
"""


@pytest.fixture
def project(tmp_path) -> Path:
    folder = tmp_path / "hA_only" / "project"
    (folder / "nets").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "nets" / "__init__.py").touch()
    (folder / "nets" / "model.py").write_text("from nets.widths import WIDTH\n")
    (folder / "nets" / "widths.py").write_text("WIDTH = 96\n")
    (folder / "data" / "values.csv").write_text("20\n1\n")
    return folder


@pytest.fixture
def hosts(tmp_path, project):
    two = TwoHosts(tmp_path / "hosts", unseen=project)
    try:
        yield two
    finally:
        two.close()


def launched(hosts: TwoHosts, project: Path, script: str, *args: str) -> tuple[int, str]:
    return hosts.labkit("launch", script, "--hosts", "hA,hB", "--nproc-per-node", "1", "--", *args, cwd=project)


@pytest.mark.parametrize("way", ["by its whole path", pytest.param("as a module", marks=pytest.mark.soak)])
def test_a_host_that_does_not_see_the_program_runs_the_runs_copy(hosts, project, way):
    words = ["-m", "train"] if way == "as a module" else [str(project / "train.py")]

    code, said = hosts.labkit("launch", "--hosts", "hA,hB", "--nproc-per-node", "1", *words, "--", "7", cwd=project)

    run = list_runs()[-1]
    assert (code, State.read(run).state) == (0, "succeeded"), said + run.node(1).supervisor_log.read_text()
    assert [run.log(rank).read_text() for rank in (0, 1)] == ["42 96 ['7']\n"] * 2


def test_the_line_of_a_failure_is_that_of_the_users_file(hosts, project):
    code, said = launched(hosts, project, "train.py", "boom")

    assert code == 1
    assert "rank 1 on hB failed: ValueError: boom (train.py line 11)" in said.replace("`", "")


def test_what_is_not_brought_is_named_and_nothing_starts(hosts, project):
    (project / "data" / "values.csv").write_bytes(b"1\n" * 5_000_000)

    code, said = launched(hosts, project, "train.py")

    assert code == 2
    assert f"hB cannot see {project}, and the run does not bring data/values.csv (9.5 MiB)" in said
    assert not list_runs()

"""Twelve node supervisors that know each other only by their files, on a file system that answers in 20 ms; torchrun
and its ranks are simulated. `python benchmarks/many_nodes.py` measures 128."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

from cluster.namespaces import needs_hosts

import labkit

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from many_nodes import Cluster  # noqa: E402

pytestmark = needs_hosts
NODES, RANKS, ANSWER_SECONDS = 12, 2, 0.02


@contextmanager
def training_nodes(root):
    cluster = Cluster(root, NODES, RANKS, ANSWER_SECONDS)
    try:
        for node in range(NODES):
            cluster.start(node)
        cluster.wait_until_all_train()
        yield cluster
    finally:
        cluster.close()


def test_all_simulated_nodes_name_the_rank_that_failed(tmp_path):
    with training_nodes(tmp_path) as cluster:
        cluster.fail(rank=9)
        cause = "rank 9 on node-004 failed: ValueError: loss is not finite"
        assert cluster.conclusions() == [("failed", cause)] * NODES


def test_all_simulated_nodes_stop_on_request(tmp_path):
    with training_nodes(tmp_path) as cluster:
        assert labkit.attach(cluster.folder.path).stop().state == "stopped"
        assert cluster.conclusions() == [("stopped", "stopped on request")] * NODES


def test_the_simulated_nodes_that_are_left_agree_when_the_first_two_are_lost(tmp_path):
    with training_nodes(tmp_path) as cluster:
        for node in (0, 1):
            cluster.lose(node)
        conclusions = cluster.conclusions()
        assert conclusions == conclusions[:1] * NODES
        state, cause = conclusions[0]
        assert state == "failed"
        assert cause.startswith("hosts node-000, node-001 were lost at ")

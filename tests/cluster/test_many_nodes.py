"""Twelve node supervisors that know each other only by their files, on a file system that answers in 20 ms; torchrun
and its ranks are simulated. `python benchmarks/many_nodes.py` measures 128."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster.namespaces import needs_hosts

import labkit
from labkit.files import read_json

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from many_nodes import Cluster  # noqa: E402

pytestmark = needs_hosts
NODES, RANKS, ANSWER_SECONDS = 12, 2, 0.02
FAILED = "rank 9 on node-004 failed: ValueError: loss is not finite"


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
        cluster.tell("fail", rank=9)
        assert cluster.conclusions() == [("failed", FAILED)] * NODES


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


@pytest.mark.soak
def test_the_simulated_nodes_learn_of_a_failure_after_the_first_one_finished_and_was_lost(tmp_path):
    with training_nodes(tmp_path) as cluster:
        cluster.tell("finish", rank=0)
        cluster.wait(lambda: read_json(cluster.folder.node(0).outcome), 30)
        cluster.lose(0)
        cluster.tell("fail", rank=9)
        assert cluster.conclusions() == [("failed", FAILED)] * NODES

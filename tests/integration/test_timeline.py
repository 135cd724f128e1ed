"""What torch's profiler recorded of real ranks, as labkit tells it."""

import json

import pytest

import labkit

STEPS, ENV = 3, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def profiled(script, **options):
    run = labkit.launch(script, nproc_per_node=2, steps=9, global_batch_size=8, profile=True, env=ENV, **options)
    for rank in (0, 1):
        end = json.loads(run.folder.metrics(rank).read_text().splitlines()[-1])
        assert (end["k"], end["dropped"]) == ("end", 0)
    return run.timeline()


def test_a_step_of_ddp_is_forward_backward_and_the_optimizer_with_two_buckets_on_the_way():
    timeline = profiled("ddp")

    assert timeline.steps == [0, 1, 2]
    for rank in (0, 1):
        for step in timeline.steps:
            spans = [s for s in timeline.spans if (s.rank, s.step) == (rank, step)]
            begins = {
                kind: min(s.start for s in spans if s.kind == kind)
                for kind in ("input", "forward", "backward", "optimizer")
            }
            assert list(begins) == sorted(begins, key=begins.get)
            reduced = sorted(s.start for s in spans if s.kind == "all_reduce")
            assert len(reduced) == 1 + 2  # the count of predictions, the two buckets of 3.5 MB of parameters
            assert begins["forward"] <= reduced[0] < begins["backward"] < reduced[1]
    row = timeline.table.loc[0]
    assert 0 < row["forward"] + row["backward"] + row["optimizer"] <= row["step_seconds"]
    assert 0 <= row["hidden"] <= 1
    assert timeline.bubble is None
    assert "ddp on 2 ranks" in repr(timeline)
    assert len(timeline.figure().to_json()) < 100_000
    assert len(timeline.animation().frames) > 10
    # one shape for all bars of a colour: where they overlap they must not cancel each other
    assert {shape.fillrule for shape in timeline.animation().layout.shapes} == {"nonzero"}


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        pytest.param("1F1B", {"forward", "backward"}, marks=pytest.mark.soak),  # lab 13 draws it
        ("InterleavedZeroBubble", {"forward", "backward", "weights"}),
    ],
)
def test_every_chunk_of_a_pipeline_is_there_once(schedule, kinds):
    timeline = profiled("pipeline", accumulate=4, schedule=schedule)

    stages = {0: (0,), 1: (1,)} if schedule == "1F1B" else {0: (0, 2), 1: (1, 3)}
    for rank, own in stages.items():
        for step in timeline.steps:
            spans = [s for s in timeline.spans if (s.rank, s.step) == (rank, step) and s.chunk is not None]
            assert {s.kind for s in spans} == kinds
            done = [(s.stage, s.chunk) for s in spans if s.kind == "forward"]
            assert sorted(done) == [(stage, chunk) for stage in own for chunk in range(4)]
    assert 0 < timeline.bubble < 1
    assert any(s.kind == "send_recv" for s in timeline.spans)

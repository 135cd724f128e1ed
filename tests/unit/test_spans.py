"""Spans from traces. These traces are written by hand: integration tests take real ones."""

import gzip
import json

import pytest

from labkit.errors import LabError
from labkit.spans import read_spans
from labkit.view.timeline import Timeline

STEP = ("user_annotation", "ProfilerStep#6", 0, 1000)


def trace(path, *events, base=0):
    """Each event is category, name, start, duration in milliseconds, and the thread if it is not 1."""
    written = []
    for category, name, start, length, *more in events:
        thread, correlation = [*more, 1, None][:2] if more else (1, None)
        written.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start * 1e3,
                "dur": length * 1e3,
                "tid": thread,
                "args": {"correlation": correlation},
            }
        )
    with gzip.open(path, "wt") as file:
        json.dump({"baseTimeNanoseconds": base, "traceEvents": written}, file)
    return path


def seen(spans, *kinds):
    return [(s.kind, round(s.start * 1e3), round(s.end * 1e3)) for s in spans if not kinds or s.kind in kinds]


def test_forward_is_what_lies_before_backward(tmp_path):
    path = trace(
        tmp_path / "rank0.json.gz",
        STEP,
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
        ("cpu_op", "aten::mm", 12, 85),
        ("user_annotation", "labkit:backward", 100, 200),
        ("cpu_op", "aten::mm", 101, 198),
        ("user_annotation", "Optimizer.step#AdamW.step", 310, 50),
        ("user_annotation", "Optimizer.step#AdamW.step", 320, 30),  # one that another steps
    )
    assert seen(read_spans({0: path})) == [
        ("input", 0, 10),
        ("forward", 10, 100),
        ("backward", 100, 300),
        ("optimizer", 310, 360),
    ]


def test_ranks_wait_where_nothing_runs_while_something_is_sent(tmp_path):
    path = trace(
        tmp_path / "rank0.json.gz",
        STEP,
        ("user_annotation", "labkit:backward", 100, 200),
        ("cpu_op", "aten::mm", 100, 100),
        ("cpu_op", "c10d::allreduce_", 199, 1),
        ("user_annotation", "gloo:all_reduce", 150, 130, 7),
    )
    spans = read_spans({0: path})
    # the first span of the recording is at zero
    assert seen(spans, "backward", "waiting") == [("backward", 100, 200), ("waiting", 200, 280), ("backward", 280, 300)]
    assert seen(spans, "all_reduce") == [("all_reduce", 150, 280)]


@pytest.mark.parametrize(("waits", "end"), [([], 300), ([("user_annotation", "labkit:wait", 302, 6)], 320)])
def test_a_collective_of_backward_ends_with_it_unless_it_is_waited_for_later(tmp_path, waits, end):
    path = trace(
        tmp_path / "rank0.json.gz",
        STEP,
        ("user_annotation", "labkit:backward", 0, 300),
        ("user_annotation", "gloo:all_reduce", 150, 170, 7),
        *waits,
        ("user_annotation", "Optimizer.step#SGD.step", 310, 50),
        ("cpu_op", "aten::add_", 310, 50),
    )
    spans = read_spans({0: path})

    assert seen(spans, "all_reduce") == [("all_reduce", 150, end)]
    assert seen(spans, "optimizer") == [("optimizer", 310, 360)]


def test_a_collective_is_called_what_the_script_called(tmp_path):
    """gloo makes reduce-scatters of all-reduces."""
    path = trace(
        tmp_path / "rank0.json.gz",
        STEP,
        ("user_annotation", "FSDP::post_backward_reduce (blocks.3)", 100, 50),
        ("cpu_op", "c10d::_reduce_scatter_base_", 110, 5),
        ("user_annotation", "gloo:all_reduce", 112, 30, 7),
    )
    (span,) = read_spans({0: path})
    assert (span.kind, span.label) == ("reduce_scatter", "blocks.3")


def test_chunks_of_a_pipeline_keep_their_stage_and_micro_batch(tmp_path):
    path = trace(
        tmp_path / "rank0.json.gz",
        STEP,
        ("user_annotation", "labkit:forward 2 1", 100, 50),
        ("user_annotation", "gloo:recv", 90, 40),  # of the next micro-batch, meanwhile
        ("user_annotation", "labkit:backward 2 1", 200, 50),
        ("user_annotation", "labkit:backward", 210, 30),  # the same one, by autograd
    )
    chunks = [span for span in read_spans({0: path}) if span.chunk is not None]
    assert [(s.kind, s.stage, s.chunk, round(s.seconds * 1e3)) for s in chunks] == [
        ("forward", 2, 1, 50),
        ("backward", 2, 1, 50),
    ]


def test_ranks_are_on_one_clock(tmp_path):
    mark = ("user_annotation", "Optimizer.step#SGD.step", 100, 50)
    paths = {
        rank: trace(tmp_path / f"rank{rank}.json.gz", STEP, mark, base=10**18 + rank * 5_000_000) for rank in (0, 1)
    }
    assert seen(read_spans(paths)) == [("optimizer", 100, 150), ("optimizer", 105, 155)]


def test_simulated_kernels_belong_to_the_phase_that_launched_them(tmp_path):
    """No GPU is here: categories and names are those of Kineto's traces of CUDA."""
    path = trace(
        tmp_path / "rank0.json.gz",
        STEP,
        ("user_annotation", "labkit:backward", 100, 20),
        ("user_annotation", "Optimizer.step#AdamW.step", 130, 10),
        ("cuda_runtime", "cudaLaunchKernel", 110, 1, 1, 11),
        ("cuda_runtime", "cudaLaunchKernel", 111, 1, 1, 12),
        ("cuda_runtime", "cudaLaunchKernel", 132, 1, 1, 13),
        ("kernel", "ampere_sgemm", 200, 50, "stream 7", 11),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 240, 60, "stream 20", 12),
        ("kernel", "multi_tensor_apply_kernel", 310, 20, "stream 7", 13),
    )
    assert sorted(seen(read_spans({0: path}))) == [
        ("all_reduce", 240, 300),
        ("backward", 200, 250),
        ("optimizer", 310, 330),
        ("waiting", 250, 300),
    ]


def test_simulated_kernels_belong_to_the_step_that_launched_them(tmp_path):
    """The host is a step ahead of the GPU, on whose streams Kineto repeats the marks of the steps."""
    path = trace(
        tmp_path / "rank0.json.gz",
        ("user_annotation", "ProfilerStep#6", 0, 100),
        ("user_annotation", "ProfilerStep#7", 100, 100),
        ("gpu_user_annotation", "ProfilerStep#6", 50, 140, "stream 7"),
        ("gpu_user_annotation", "ProfilerStep#7", 190, 210, "stream 7"),
        ("user_annotation", "labkit:backward", 10, 20),
        ("cuda_runtime", "cudaLaunchKernel", 11, 1, 1, 11),
        ("cuda_runtime", "cudaLaunchKernelExC", 12, 1, 1, 12),
        ("kernel", "ampere_sgemm", 50, 90, "stream 7", 11),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 140, 50, "stream 20", 12),
        ("user_annotation", "labkit:backward", 110, 20),
        ("cuda_runtime", "cudaLaunchKernel", 111, 1, 1, 13),
        ("cuda_driver", "cuLaunchKernelEx", 112, 1, 1, 14),
        ("kernel", "ampere_sgemm", 190, 160, "stream 7", 13),  # until after the last step of the host
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 350, 50, "stream 20", 14),
    )
    spans = read_spans({0: path})
    assert sorted((span.step, *place) for span, place in zip(spans, seen(spans), strict=True)) == [
        (0, "all_reduce", 140, 190),
        (0, "backward", 50, 140),
        (0, "waiting", 140, 190),
        (1, "all_reduce", 350, 400),
        (1, "backward", 190, 350),
        (1, "waiting", 350, 400),
    ]


@pytest.fixture
def run(folder):
    folder.manifest.write_text(json.dumps({"format": 1, "name": "demo", "world_size": 2, "script": {}}))
    return folder


def test_a_run_without_a_profile_says_how_to_get_one(run):
    with pytest.raises(LabError, match=r"has no profile. run.profile\(\) .* launch\(…, profile=True\)"):
        Timeline(run)


@pytest.mark.parametrize(
    "content",
    [b"nonsense", gzip.compress(b"[]"), gzip.compress(b'{"traceEvents": [{"ph": "X"')],
    ids=["no gzip", "no events", "cut off"],
)
def test_a_broken_profile_is_named(run, content):
    run.profile(0).parent.mkdir()
    run.profile(0).write_bytes(content)
    with pytest.raises(LabError, match="cannot be read"):
        Timeline(run)


def test_a_pipelines_bubble_is_the_share_of_time_that_no_chunk_fills(run):
    run.profile(0).parent.mkdir()
    for rank, (start, length) in enumerate([(0, 60), (40, 60)]):
        chunk = ("user_annotation", f"labkit:forward {rank} 0", start, length)
        of_tensor_ranks = ("cpu_op", "_c10d_functional::wait_tensor", start + 10, 20)
        trace(run.profile(rank), STEP, chunk, of_tensor_ranks)
    timeline = Timeline(run)
    assert sum(span.kind == "waiting" for span in timeline.spans) == 2
    assert timeline.bubble == pytest.approx(1 - 120 / 200)
    assert "bubble 40%" in repr(timeline)


def test_a_step_of_several_passes_through_a_pipeline_has_no_negative_bubble(run):
    run.profile(0).parent.mkdir()
    kinds = ["forward", "backward"] * 4
    for rank in range(2):
        chunks = [("user_annotation", f"labkit:{kind} {rank} 0", 50 * n, 50) for n, kind in enumerate(kinds)]
        trace(run.profile(rank), STEP, *chunks, ("cpu_op", "_c10d_functional::wait_tensor", 60, 20))
    assert Timeline(run).bubble == pytest.approx(0)
    trace(run.profile(1), STEP, *chunks[:4])
    assert Timeline(run).bubble == pytest.approx(1 / 4)


def test_a_rank_that_recorded_nothing_is_left_out_and_a_step_that_is_not_there_is_named(run):
    run.profile(0).parent.mkdir()
    trace(run.profile(0), STEP, ("user_annotation", "labkit:forward 0 0", 0, 60))
    trace(run.profile(1), ("cpu_op", "aten::mm", 0, 1))  # it ended while its profiler warmed up
    timeline = Timeline(run)
    assert timeline.ranks == [0]
    assert "on 1 rank:" in repr(timeline)
    with pytest.raises(LabError, match="step 7 was not recorded; recorded steps: 0"):
        timeline.figure(7)
    run.profile(0).unlink()
    with pytest.raises(LabError, match="has no profile"):
        Timeline(run)


def test_a_saved_notebook_has_a_picture_and_jupyterlab_a_figure(run):
    run.profile(0).parent.mkdir()
    marks = ("user_annotation", "labkit:backward", 100, 200), ("user_annotation", "gloo:all_reduce", 350, 730, 7)
    trace(run.profile(0), STEP, *marks)
    timeline = Timeline(run)

    assert [s.kind for s in timeline.spans if s.end > 1.0] == ["all_reduce"]  # what is sent may arrive later
    bundle = timeline._repr_mimebundle_()
    assert bundle["text/html"].startswith('<img src="data:image/svg+xml;base64,')
    assert len(json.dumps(bundle)) < 100_000
    bars = bundle["application/vnd.plotly.v1+json"]["data"]
    assert {bar["name"] for bar in bars} >= {"backward", "all-reduce"}
    # otherwise a pattern takes the place of the colour
    assert all(bar["marker"]["pattern"]["fillmode"] == "overlay" for bar in bars)

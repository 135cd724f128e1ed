"""What is said about ranks that do not move, from what each of them was seen doing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.files import write_json
from labkit.launcher.causes import stacks
from labkit.launcher.causes.stacks import Frame, RankStack, WorkerStack, crash_frames, main_thread, readable
from labkit.launcher.causes.stuck import Stacks
from labkit.launcher.causes.stuck import explain as explain_stacks
from labkit.write import Script

SCRIPT = Script.parse("# %% setup\nimport time\n\n# %% main\ntime.sleep(600)\nwork()\n", name="train.py")
PATH = "/x/train.py"
MAIN = Frame(PATH, 6, "<module>")
SLEEPS = [Frame(PATH, 5, "<module>")]
REDUCES = [Frame("/t/c10d.py", 3252, "all_reduce"), Frame("/t/logger.py", 83, "wrapper"), MAIN]


def call(
    number: int,
    name: str = "all_reduce",
    *,
    retired: bool = False,
    group: str = "default_pg",
    sizes: int = 8,
    backend: str = "gloo",
    ranks: str = "",
    created: int | None = None,
) -> dict:
    return {
        "process_group": ["7", group],
        "collective_seq_id": number,
        "profiling_name": f"{backend}:{name}",
        "input_sizes": [[sizes]],
        "input_dtypes": ["Float"],
        "is_p2p": False,
        "retired": retired,
        "ranks": ranks,
        "time_created_ns": number if created is None else created,
    }


def rank(
    number: int, frames: list[Frame], *calls: dict, process: str = "sleeping", answered: str = "itself"
) -> RankStack:
    return RankStack(number, 4, 9.0, process, answered, frames, list(calls), text="File …")


def explain(ranks: list[RankStack], script: Script, path: str) -> str:
    return explain_stacks(ranks, script, path).sentence


def test_a_rank_that_has_not_entered_the_collective_comes_first() -> None:
    said = explain([rank(0, REDUCES, call(5)), rank(1, SLEEPS, call(4, retired=True))], SCRIPT, PATH)

    assert said == (
        "rank 1 has not entered `all_reduce` #5. Rank 1 is at step 4 in train.py line 5, cell `main`: "
        "`time.sleep(600)`; rank 0 is at step 4, waiting in `all_reduce` (train.py line 6, cell `main`)"
    )


def test_a_rank_that_is_compiling_says_so_and_one_that_executes_a_cuda_graph_does_not() -> None:
    def explained(*inner: str) -> str:
        frames = (
            *inner,
            '"/v/torch/_dynamo/eval_frame.py", line 5 in compile_wrapper',
            f'"{PATH}", line 6 in <module>',
        )
        dump = "Thread 0x00007f4de3e8fb80 (most recent call first):\n" + "".join(f"  File {f}\n" for f in frames)
        return explain([replace(rank(0, main_thread(dump)), text=dump)], SCRIPT, PATH)

    compiling = explained(
        '"/v/torch/_inductor/codecache.py", line 9 in load', '"/v/torch/_dynamo/convert_frame.py", line 3 in __call__'
    )
    executing = explained(
        '"/v/torch/_inductor/cudagraph_trees.py", line 9 in run', '"/v/torch/_inductor/compile_fx.py", line 3 in run'
    )

    assert compiling == "rank 0 is at step 4, compiling in torch.compile (train.py line 6, cell `main`)"
    assert executing == "rank 0 is at step 4, in `compile_wrapper` (train.py line 6, cell `main`)"


def test_ranks_that_called_different_things_disagree() -> None:
    said = explain([rank(0, REDUCES, call(5)), rank(1, REDUCES, call(5, "broadcast", sizes=9))], SCRIPT, PATH)

    assert said.startswith(
        "the ranks disagree: as collective #5 rank 0 called all_reduce(Float [8]), "
        "rank 1 called broadcast(Float [9]). Rank 0 is at"
    )


def test_calls_in_different_groups_are_not_compared() -> None:
    said = explain([rank(0, REDUCES, call(5)), rank(1, REDUCES, call(3, "broadcast", group="dp"))], SCRIPT, PATH)

    assert "disagree" not in said
    assert "not entered" not in said


def test_the_first_call_that_differs_is_named_though_hosts_have_run_ahead_of_their_gpus_made_up_records() -> None:
    later = [call(number) for number in (6, 7)]
    said = explain([rank(0, REDUCES, call(5), *later), rank(1, REDUCES, call(5, sizes=9), *later)], SCRIPT, PATH)

    assert "as collective #5 rank 0 called all_reduce(Float [8]), rank 1 called all_reduce(Float [9])" in said


def test_a_rank_has_not_entered_the_oldest_call_that_others_wait_in() -> None:
    ahead = [call(4, retired=True), *(call(number) for number in (5, 6, 7, 8, 9))]
    said = explain([rank(0, REDUCES, *ahead), rank(1, SLEEPS, call(4, retired=True))], SCRIPT, PATH)

    assert said.startswith("rank 1 has not entered `all_reduce` #5. Rank 1 is at step 4 in train.py line 5")


@pytest.mark.parametrize(("name", "retired"), [("all_reduce", True), ("all_to_all", False)])
def test_sizes_may_differ_in_calls_that_completed_and_in_those_that_allow_it(name: str, retired: bool) -> None:
    ranks = [rank(n, REDUCES, call(4, name, sizes=8 + n, retired=retired), call(5)) for n in range(2)]

    assert "disagree" not in explain(ranks, SCRIPT, PATH)


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    first = rank(0, REDUCES, call(1, group="tp", retired=True), call(3, group="dp", retired=True), call(2, group="tp"))
    other = rank(1, REDUCES, call(1, group="tp", retired=True), call(3, group="dp", retired=True), call(4, group="dp"))

    assert explain([first, other], SCRIPT, PATH).startswith(
        "the ranks are waiting for each other: rank 0 waits in `all_reduce` #2 of group `tp` for rank 1; "
        "rank 1 waits in `all_reduce` #4 of group `dp` for rank 0. Rank 0 is at step 4"
    )


def test_the_rank_at_the_end_of_a_chain_of_waiting_is_the_one_that_is_late() -> None:
    done = [call(1, group=group, retired=True) for group in ("tp", "dp")]
    waits = rank(0, REDUCES, *done, call(2, group="tp")), rank(1, REDUCES, *done, call(2, group="dp", created=9))

    said = explain([*waits, rank(2, SLEEPS, call(1, group="dp", retired=True))], SCRIPT, PATH)

    assert said.startswith("rank 2 has not entered `all_reduce` #2 of group `dp`")


def test_groups_of_one_name_are_distinguished_by_backend_and_ranks_made_up_records() -> None:
    by_backend = [rank(0, REDUCES, call(5, backend="nccl")), rank(1, REDUCES, call(5, "broadcast"))]
    by_ranks = [rank(0, REDUCES, call(5, ranks="[0, 2]")), rank(1, REDUCES, call(5, "broadcast", ranks="[1, 3]"))]

    for ranks in (by_backend, by_ranks):
        assert "disagree" not in explain(ranks, SCRIPT, PATH)


def test_all_in_the_same_collective() -> None:
    said = explain([rank(0, REDUCES, call(5)), rank(1, REDUCES, call(5))], SCRIPT, PATH)

    assert said.startswith("all ranks are in `all_reduce` #5, which does not complete; rank 0 is at step 4, waiting in")


@pytest.mark.parametrize(
    ("process", "words"), [("stopped", "rank 1 is stopped by a signal"), ("gone", "rank 1 is gone; rank 0")]
)
def test_the_state_of_a_process_is_the_best_evidence(process: str, words: str) -> None:
    assert explain([rank(0, REDUCES, call(5)), rank(1, [], process=process)], SCRIPT, PATH).startswith(words)
    assert explain([rank(1, [], process=process)], SCRIPT, PATH) in (
        "rank 1 is gone",
        "rank 1 is stopped by a signal (SIGSTOP, or a debugger) at step 4",
    )


def test_a_rank_that_has_finished_is_not_gone_and_one_that_does_not_leave_is_named() -> None:
    left = replace(rank(0, [], process="gone"), outcome="finished")
    leaving = replace(rank(1, SLEEPS, process="sleeping"), outcome="finished")

    assert explain([left, leaving], SCRIPT, PATH) == (
        "rank 0 has finished; rank 1 has finished its script and is still exiting in train.py line 5, cell `main`: "
        "`time.sleep(600)` (an atexit handler, or a non-daemon thread)"
    )
    assert explain([left, rank(1, REDUCES, call(5))], SCRIPT, PATH).startswith("rank 0 has finished; rank 1 is at step")


def test_without_a_flight_recorder_it_is_said_where_each_is() -> None:
    said = explain([rank(0, REDUCES), rank(1, SLEEPS, answered="signal")], SCRIPT, PATH)

    assert said.startswith(
        "rank 0 is at step 4, in `all_reduce` (train.py line 6, cell `main`); rank 1 is at step 4 in"
    )
    assert said.endswith("`time.sleep(600)`, and holds the GIL")


def test_sixty_four_ranks_still_make_a_sentence() -> None:
    ranks = [rank(0, REDUCES, call(5)), *(rank(n, SLEEPS, call(4, retired=True)) for n in range(1, 64))]

    assert "and 59 more" in (said := explain(ranks, SCRIPT, PATH))
    assert len(said) < 1000


def test_no_rank_yet() -> None:
    assert explain([], SCRIPT, PATH) == "no rank has started yet"


def test_stacks_show_themselves_escaped() -> None:
    stacks = Stacks("rank 0 <b>", [rank(0, SLEEPS)])

    assert repr(stacks).startswith("rank 0 <b>\n\n== rank 0, step 4, sleeping ==")
    assert "rank 0 &lt;b&gt;" in stacks._repr_mimebundle_()["text/html"]


DUMP = """
# 03:20:34, step 4
Thread 0x00007fd0136ff6c0 (most recent call first):
  File "/p/threading.py", line 982 in run

Current thread 0x00007fd014e22b80 [MainThread] (most recent call first):
  File "/x/a b.py", line 74 in reduce
  File "/x/a b.py", line 100 in main
"""


def test_the_main_thread_is_the_last_one_listed() -> None:
    assert main_thread(DUMP) == [Frame("/x/a b.py", 74, "reduce"), Frame("/x/a b.py", 100, "main")]
    assert main_thread("garbage \x00\n  File") == []


def test_stacks_are_shown_without_labkits_threads_and_frames_and_without_shim_frames() -> None:
    main = """Thread 0x00007fd014e22b80 [MainThread] (most recent call first):
  File "/x/train.py", line 74 in reduce
  File "/x/train.py", line ??? in <genexpr>"""
    dump = f"""Thread 0x00007fd0126ff6c0 [python] (most recent call first):
  File "/p/labkit/worker/guest.py", line 66 in answer
  File "/p/labkit/worker/guest.py", line 54 in live

{main}
  File "/p/labkit/worker/guest.py", line 40 in main
  File "__init__", line ??? in __init__
  File "<shim>", line ??? in <interpreter trampoline>
  File "/p/labkit/launcher/warm/outermost.py", line 28 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""
    assert readable(dump) == main


def test_the_frames_of_a_crash_are_those_of_the_thread_it_hit(tmp_path) -> None:
    file = tmp_path / "stacks.txt"
    assert crash_frames(file) == []
    file.write_text(DUMP)
    assert crash_frames(file) == []
    file.write_text(f"{DUMP}\nFatal Python error: Segmentation fault\n{DUMP.split('4', 1)[1]}\nExtension modules: x")
    assert [frame.line for frame in crash_frames(file)] == [74, 100]


def test_ranks_of_another_machine_are_asked_over_the_shared_folder_and_not_said_to_be_gone(folder, monkeypatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.1)
    there = {"pid": 1, "started": 2.0, "boot": "another", "host": "another-host"}
    write_json(folder.agent, {"supervisor": there})
    folder.rank(0).mkdir()
    write_json(folder.heartbeat(0), {"pid": 1, "step": 7, "t": 10.0, "moved": 4.0})

    (seen,) = stacks.ask(folder, folder)

    assert (seen.process, seen.step, seen.idle) == ("unknown", 7, 6.0)
    assert explain([seen], SCRIPT, PATH) == "rank 0 is at step 7"


LOADS = [Frame("/t/torch/utils/data/dataloader.py", 725, "__next__"), MAIN]
READS = Script.parse(
    "import time\n\ndef rows(i):\n    with open(i) as file:\n        return file.read()\n", name="train.py"
)
THREAD = 'Thread 0x1 (most recent call first):\n  File "/x/train.py", line 2 in refresh\n\n'
MAIN_THREAD = 'Thread 0x2 (most recent call first):\n  File "/x/train.py", line 6 in <module>\n'


@pytest.mark.parametrize(
    ("sleeps_in", "others", "may_be_a_lock"),
    [("futex_do_wait", THREAD, True), ("futex_do_wait", "", False), ("io_schedule", THREAD, False)],
)
def test_a_lock_is_only_suspected_of_a_worker_that_waits_for_one(
    sleeps_in: str, others: str, may_be_a_lock: bool
) -> None:
    worker = WorkerStack(71, "sleeping", [Frame(PATH, 4, "rows")], "File …", sleeps_in)
    waiting = replace(rank(1, LOADS), text=others + MAIN_THREAD, workers=[worker], awaited=71)

    said = explain([waiting], READS, PATH)

    where = "waiting for its DataLoader's worker (pid 71), which is in train.py line 4: `with open(i) as file:`"
    assert where in said
    assert ("a lock that the rank's thread in `refresh`" in said) == may_be_a_lock


def test_a_rank_that_does_not_wait_for_its_worker_is_where_it_is() -> None:
    said = explain([replace(rank(0, SLEEPS), awaited=71)], SCRIPT, PATH)

    assert said == "rank 0 is at step 4 in train.py line 5, cell `main`: `time.sleep(600)`"

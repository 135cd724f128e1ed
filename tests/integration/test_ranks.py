"""Ranks that wait for cells: real ranks of torchrun's, without a notebook. tests/browser/test_ranks.py has one."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

import labkit
from labkit import interactive_ranks, ranks_magic
from labkit.cell_execution import Execution
from labkit.cell_output import CellOutput
from labkit.worker import CellFolder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = labkit.ranks(2, timeout=4, runs_dir=tmp_path_factory.mktemp("ranks") / "runs")
    yield started
    started.stop()


def processes_of(run):
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("LABKIT_RUN") == run.id]


def test_variables_stay_and_the_same_output_is_shown_once(ranks, capsys):
    ranks.exec("a = 3 * rank")
    ranks.exec("print('hello')\na + 1")
    ranks.exec("'both'")
    ranks.exec("'quiet';")

    assert capsys.readouterr().out == "== rank 0 ==\nhello\n1\n== rank 1 ==\nhello\n4\n== ranks 0, 1 ==\n'both'\n"
    assert ranks.logs(rank=1).endswith("hello\n4\n'both'\n")


def test_a_cell_may_concern_one_rank(ranks, capsys):
    ranks.exec("print(rank); alone = 1", ranks=[1])
    ranks.exec("'alone' in globals()")

    assert capsys.readouterr().out == "== rank 1 ==\n1\n== rank 0 ==\nFalse\n== rank 1 ==\nTrue\n"
    with pytest.raises(labkit.LabError, match=r"ranks must be among 0, 1; got \[2\]"):
        ranks.exec("1", ranks=[2])


def test_values_are_pulled_and_pushed(ranks):
    batch = {"x": torch.arange(6.0).view(2, 3), "names": ["a", ("b", 2)], "nothing": None}
    ranks.push(batch=batch)
    pulled = ranks.pull("batch")

    assert pulled[1]["x"].equal(batch["x"]) and pulled[1]["names"] == ["a", ("b", 2)]
    ranks.exec("w = torch.nn.Parameter(torch.full((2,), float(rank))); import numpy as np; n = np.arange(3)")
    assert {rank: value.tolist() for rank, value in ranks.pull("w * 2").items()} == {0: [0, 0], 1: [2, 2]}
    assert ranks.pull("n.sum(), rank", ranks=[1]) == {1: (3, 1)}


def test_a_script_says_what_it_lacks_of_what_was_pushed(ranks):
    ranks.push(batch=torch.ones(2), lr=0.5)

    pushed = "batch = None  # pushed from the notebook\nlr = 0.5  # pushed from the notebook\n"
    assert f'{pushed}raise SystemExit("assign batch above, which the notebook had pushed")' in str(ranks.executed())


def test_a_sharded_tensor_is_gathered_if_all_ranks_are_asked(ranks):
    ranks.exec(
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "d = distribute_tensor(torch.arange(4.0), init_device_mesh(device.type, (2,)), [Shard(0)])"
    )

    assert ranks.pull("d")[0].tolist() == [0, 1, 2, 3]
    assert ranks.pull("d", ranks=[1])[1].tolist() == [2, 3]


def test_what_cannot_be_sent_is_named(ranks):
    with pytest.raises(labkit.LabError, match="f is of type function: only tensors, .* define it in a cell: %%ranks"):
        ranks.push(f=lambda: 1, good=1)
    with pytest.raises(labkit.LabError, match="torch.nn.Linear is of type type|dist is of type module"):
        ranks.pull("dist")
    with pytest.raises(labkit.LabError, match="pull takes an expression such as 'loss.item\\(\\)', got 'a = 1'"):
        ranks.pull("a = 1")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("1 / 0", "ranks 0, 1 raised ZeroDivisionError: division by zero in line 1$"),
        ("a = 1\nif rank == 1:\n    {}['k']", "rank 1 raised KeyError: 'k' in line 3$"),
        ("x = 1\ndef f(:\n    pass", "ranks 0, 1 raised SyntaxError: .* in line 2$"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("exit()", r"raised SystemExit: ranks.stop\(\) ends the ranks"),
        ("breakpoint()", "raised RuntimeError: ranks have no terminal for a debugger"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "raised E in line 3"),
        (
            "from IPython.display import display\ndisplay({'application/json': {1}}, raw=True)",
            "raised TypeError: .*set is not JSON serializable in line 2",
        ),
    ],
)
def test_an_exception_is_named_with_rank_and_line_and_the_ranks_live_on(ranks, capsys, cell, message):
    with pytest.raises(labkit.LabError, match=message):
        ranks.exec(cell)

    assert "labkit/" not in capsys.readouterr().out.replace("labkit/worker/cells.py", "")  # no frame of ours
    assert ranks.pull("1 + 1") == {0: 2, 1: 2}


@pytest.mark.parametrize(
    "cell",
    [
        "import io; sys.stdout = io.StringIO(); sys.stdout.close()",
        "if os.fork() == 0: child = True",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "for rank in range(2): pass\nworld_size = device = None",
    ],
)
def test_what_a_cell_leaves_behind_does_not_hinder_the_next_ones(ranks, cell):
    ranks.exec("out = sys.stdout")
    ranks.exec(cell)
    ranks.exec("sys.stdout = out")
    assert ranks.pull("'child' in globals()") == {0: False, 1: False}
    with pytest.raises(labkit.LabError, match="KeyboardInterrupt"):
        ranks.exec("import time\ntime.sleep(60)", timeout=0.2)
    ranks.exec("dist.destroy_process_group()\njoin_ranks()\nx = torch.ones(1)\ndist.all_reduce(x)")
    assert ranks.pull("x.item()") == {0: 2.0, 1: 2.0}
    ranks.exec("rank, world_size, device = dist.get_rank(), 2, torch.device('cpu')")


def test_a_pull_outside_what_python_calls_an_exception_is_an_error(ranks):
    with pytest.raises(labkit.LabError, match="raised SystemExit: 3"):
        ranks.pull("sys.exit(3)")
    assert ranks.pull("1") == {0: 1, 1: 1}


def test_a_part_of_a_tensor_is_pulled_alone_and_nothing_stays_on_disk(ranks):
    ranks.exec("large = torch.zeros(1_000_000)")
    assert ranks.pull("large[:2]")[1].untyped_storage().nbytes() == 8
    ranks.push(y=torch.ones(2))
    assert not [*ranks.folder.cells.glob("*/values*")]


def test_what_could_not_be_written_as_a_whole_leaves_nothing(ranks):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ranks.exec(f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, {limits[1]}))")
    with pytest.raises(labkit.LabError, match="ranks 0, 1 raised OSError.*File too large"):
        ranks.pull("torch.zeros(1_000_000)")
    ranks.exec(f"resource.setrlimit(resource.RLIMIT_FSIZE, {limits})")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(labkit.LabError, match="the cell could not be written.*File too large"):
            ranks.push(x=torch.zeros(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*ranks.folder.cells.rglob("values*")]


def test_an_interrupt_while_the_output_is_read_interrupts_the_cell(ranks):
    class Interrupted(CellOutput):
        has_been = False

        def update(self, cell, answers):
            if not self.has_been and cell.begun():
                self.has_been = True
                signal.raise_signal(signal.SIGINT)

    request = {"kind": "cell", "ranks": [1], "text": "import time; time.sleep(30)", "count": 1}
    cell = CellFolder.post(ranks.folder.cells, request)
    answers = Execution(cell, [1], lambda: None, Interrupted(None)).wait()
    assert answers[1].error == "KeyboardInterrupt"


def test_a_rank_that_does_not_come_is_named_and_collectives_work_again(ranks, capsys):
    ranks.exec("t = torch.ones(1)")
    with pytest.raises(
        labkit.LabError,
        match="rank 1 did not come to all_reduce in line 2, where rank 0 waited; .* joined a new process group",
    ):
        ranks.exec("if rank == 0:\n    dist.all_reduce(t)")
    ranks.exec("t = torch.ones(1); dist.all_reduce(t)")

    assert ranks.pull("t.item()") == {0: 2.0, 1: 2.0}


def test_a_rank_that_came_is_not_said_to_be_missing(ranks):
    with pytest.raises(labkit.LabError, match=r"^rank 1 raised RuntimeError: .*new process group"):
        ranks.exec("t = torch.ones(2 + 2 * rank)\ndist.all_reduce(t)")


def test_a_destroyed_group_is_no_loss(ranks, capsys):
    ranks.exec("dist.destroy_process_group()")
    assert "these ranks have no process group now; join_ranks() in a cell makes one" in capsys.readouterr().out
    ranks.exec("join_ranks()\nt = torch.ones(1)\ndist.all_reduce(t)")

    assert ranks.pull("t.item()") == {0: 2.0, 1: 2.0}


def test_a_cell_that_takes_too_long_is_interrupted(ranks):
    with pytest.raises(
        labkit.LabError, match="^the cell was interrupted after 0.3 s; ranks 0, 1 raised KeyboardInterrupt in line 2"
    ):
        ranks.exec("import time\ntime.sleep(60)", timeout=0.3)
    assert ranks.pull("rank") == {0: 0, 1: 1}


def test_an_interrupt_frees_a_rank_that_waits_for_one_that_has_ended_the_cell(tmp_path):
    ranks = labkit.ranks(2, timeout=300, runs_dir=tmp_path)
    ranks.exec("from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh('cpu', (2,))")
    began = time.monotonic()
    threading.Timer(7, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(labkit.LabError, match="rank 0 raised KeyboardInterrupt in line 1.*new process group"):
        ranks.exec("if rank == 0: dist.barrier()")
    assert time.monotonic() - began < 60
    ranks.exec("t = torch.ones(1); dist.all_reduce(t)")
    assert ranks.pull("t.item()") == {0: 2.0, 1: 2.0}
    ranks.stop()
    assert not processes_of(ranks)


def test_ten_megabytes_are_in_the_log_and_their_ends_are_shown(ranks, capsys):
    ranks.exec("for i in range(100_000):\n    print('x' * 99)\nprint('end')")
    shown = capsys.readouterr().out

    assert 40_000 < len(shown) < 45_000
    assert "[… 9.5 MiB left out; logs(rank=…) has all of it …]" in shown
    assert shown.startswith("== ranks 0, 1 ==\nxxx") and shown.endswith("x\nend\n")


def test_pictures_and_tables_are_displayed_and_magics_work(ranks, capsys):
    ranks.exec("from IPython.display import HTML\nHTML('<b>bold</b>')")
    ranks.exec("%timeit -n1 -r1 pass\n!echo from a shell", ranks=[0])
    ranks.exec("import asyncio\nawait asyncio.sleep(0)\nrank", ranks=[1])
    shown = capsys.readouterr().out

    assert (
        "<IPython.core.display.HTML object>" in shown
        and "from a shell" in shown
        and shown.endswith("== rank 1 ==\n1\n")
    )


def test_a_training_is_gone_through_by_hand_as_the_script_does_it(ranks, tmp_path):
    script = labkit.Script.load("fsdp")
    run = labkit.launch(script, nproc_per_node=2, steps=1, global_batch_size=8, runs_dir=tmp_path, wait=True)
    ranks.load(script, steps=1, global_batch_size=8)
    ranks.exec(
        "mesh = make_mesh(device.type, args)\ntorch.manual_seed(args.seed)\n"
        "model = parallelize(Model(), mesh, device, args)\n"
        "batch = next(iter(batches(load_datasets('')[0], 4, mesh, args, epoch=0)))"
    )
    ranks.exec("loss = forward_backward(model, batch, mesh, args)")
    losses = ranks.pull("loss")

    assert sum(loss.item() for loss in losses.values()) / 2 == pytest.approx(run.losses().loc[1], rel=1e-6)
    assert ranks.pull("type(model.blocks[0].qkv.weight.grad).__name__") == {0: "DTensor", 1: "DTensor"}


def doubled(x):
    return x + x


def test_what_a_cell_of_the_notebook_defines_is_defined_on_the_ranks(ranks):
    ranks.load(labkit.Script.parse("def tripled(x):\n    return 3 * x\n\n\nif __name__ == '__main__':\n    1 / 0\n"))

    assert ranks.pull("tripled(rank)") == {0: 0, 1: 3}
    own = "from __future__ import annotations\nimport math\n# %% model\nhalf: Half = math.pi / 2\n"
    ranks.load(labkit.Script.parse(own))
    assert ranks.pull("half > 1") == {0: True, 1: True}
    for training in ("for step in range(3): pass\n", "# %% data\nx = 1\n# %% run\ndist.barrier()\n"):
        with pytest.raises(labkit.ScriptError, match=r"cell also runs code at line 1: .*; put it under `if __name__"):
            ranks.load(labkit.Script.parse(training))
    ranks.load(doubled)
    assert ranks.pull("doubled(rank)") == {0: 0, 1: 2}
    with pytest.raises(labkit.ScriptError):
        ranks.load(3)


def test_what_was_tried_is_a_script_that_torchrun_runs(tmp_path):
    ranks = labkit.ranks(2, runs_dir=tmp_path / "runs")
    ranks.exec("x = torch.full((1,), float(rank + 1))")
    # one write each, or the lines of two ranks could be mixed
    ranks.exec("dist.all_reduce(x)\nprint(f'sum {x.item()} on {rank}\\n', end='')", ranks=None)
    ranks.exec("print(f'only here {rank} ' + repr('''a\n b''') + '\\n', end='')", ranks=[1])
    with pytest.raises(labkit.LabError):
        ranks.exec("1 / 0")
    ranks.exec("%timeit -n1 -r1 pass", ranks=[0])
    ranks.push(lr=0.5)
    ranks.exec("# a remark", ranks=[1])
    ranks.exec("import asyncio\nawait asyncio.sleep(0)")
    ranks.exec("from __future__ import annotations\nlate: Late = 1")
    ranks.exec("dist.destroy_process_group(); dist = 'a distance'")
    script = ranks.executed()
    assert not labkit.check(script) and not labkit.check(ranks.script)
    ranks.stop()
    assert (
        "1 / 0" not in str(script)
        and "#   %timeit" in str(script)
        and "lr = 0.5  # pushed from the notebook" in str(script)
    )
    path = script.write(tmp_path / "tried.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert sorted(done.stdout.splitlines()) == ["only here 1 'a\\n b'", "sum 3.0 on 0", "sum 3.0 on 1"]


def test_a_rank_that_is_killed_in_a_cell_is_named_and_nothing_is_left(tmp_path):
    ranks = labkit.ranks(2, runs_dir=tmp_path)
    victim = ranks.pull("os.getpid()")[1]
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(labkit.RankFailedError, match=r"rank 1 was killed \(SIGKILL\)"):
        ranks.exec("import time; time.sleep(60)")
    with pytest.raises(labkit.RankFailedError):
        ranks.exec("1")
    assert not processes_of(ranks)


def test_a_rank_that_exits_in_a_cell_ends_the_run_by_name(tmp_path):
    ranks = labkit.ranks(2, runs_dir=tmp_path)
    with pytest.raises(labkit.RankFailedError, match="rank 1 exited in a cell"):
        ranks.exec("os._exit(0)", ranks=[1])
    assert not processes_of(ranks)


def test_another_process_sends_cells_to_the_same_ranks(ranks):
    ranks.exec("count = 0")
    code = (
        f"import labkit\nranks = labkit.ranks(run={str(ranks.path)!r})\n"
        "for _ in range(20): ranks.exec('count += 1; dist.barrier()')"
    )
    other = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(20):
        ranks.exec("count += 1; dist.barrier()")
    assert other.wait(60) == 0
    assert ranks.pull("count") == {0: 40, 1: 40}


def test_a_cell_without_a_run_goes_to_the_ranks_of_its_own_process(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))  # where another notebook's are newer
    code = f"import labkit, time\nlabkit.ranks(1, runs_dir={str(tmp_path)!r})\nprint('up', flush=True)\ntime.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "up\n"
        labkit.ranks(run=ranks.path)
        try:
            ranks_magic.ranks("--ranks 1", "mine = True")
            assert ranks.pull("'mine' in globals()") == {0: False, 1: True}
            assert interactive_ranks.opened().path != ranks.path
        finally:
            other.kill()


def test_ranks_end_when_no_notebook_looks_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(interactive_ranks, "UNWATCHED_SECONDS", 3.0)
    monkeypatch.setattr(interactive_ranks, "_keep_looking", lambda folder: None)  # a kernel that is gone
    ranks = labkit.ranks(2, runs_dir=tmp_path)
    deadline = time.monotonic() + 30
    while not ranks.status().is_final and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks.status().state == "succeeded"
    with pytest.raises(labkit.LabError, match=r"these ranks have ended \(succeeded.*start others with labkit.ranks"):
        ranks.exec("1")


def test_ranks_that_are_looked_at_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(interactive_ranks, "UNWATCHED_SECONDS", 3.0)
    monkeypatch.setattr(interactive_ranks, "LOOK_SECONDS", 0.5)
    ranks = labkit.ranks(2, runs_dir=tmp_path)
    time.sleep(8)
    assert ranks.pull("rank") == {0: 0, 1: 1}
    assert "\nwaiting for cells\n" in str(labkit.Run(ranks.folder))
    ranks.stop()


def test_a_run_of_a_training_is_no_place_for_cells(ranks, tmp_path):
    run = labkit.launch("single", nproc_per_node=1, steps=1, runs_dir=tmp_path, wait=True)

    with pytest.raises(labkit.LabError, match="do not wait for cells; those of labkit.ranks"):
        labkit.ranks(run=run.path)
    with pytest.raises(labkit.LabError, match=r"wait for cells: labkit.ranks\(run="):
        labkit.attach(ranks.path).exec("1")
    with pytest.raises(labkit.LabError, match="ranks are not restarted.*leave out retries="):
        labkit.ranks(2, retries=1)
    with pytest.raises(
        labkit.LabError, match="no option .setps.; did you mean .* There are: timeout, keep, run, nproc"
    ):
        labkit.ranks(2, setps=3)

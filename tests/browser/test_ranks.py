"""Ranks that wait for cells, in JupyterLab: what one does with them, and what happens when something fails."""

import re

START = "import labkit\nranks = labkit.ranks({count}, timeout={timeout})\nranks"
STEP = """%%ranks
from torch.distributed.tensor import DTensor
mesh = make_mesh(device.type, args)
torch.manual_seed(0)
model = parallelize(Model(width=32, layers=2), mesh, device, args)
optimizer = make_optimizer(model, mesh, args)
batch = next(iter(batches(load_datasets("")[0], 4, mesh, args, epoch=0)))
"""


def test_ten_things_that_one_does_with_two_ranks(notebook):
    cells = [
        START.format(count=2, timeout=4),
        "%%ranks\nprint('I am', rank)",
        "%%ranks\nx = torch.full((2,), float(rank + 1))\ndist.all_reduce(x)\nx",
        "%%ranks\nif rank == 1:\n    {}['missing']",
        "%%ranks\nif rank == 0:\n    dist.all_reduce(x)",
        "{rank: value.tolist() for rank, value in ranks.pull('x * (rank + 1)').items()}",
        "ranks.push(lr=0.25)",
        "%%ranks\nlr * 2",
        "%%ranks --ranks 1\nimport matplotlib.pyplot as plt\nplt.figure(figsize=(3, 1.5))\nplt.plot([0, 1, rank])",
        "ranks.load(labkit.Script.load('fsdp'))",
        STEP,
        "%%ranks\nloss = forward_backward(model, batch, mesh, args)\nweight = model.blocks[0].qkv.weight\n"
        "print(type(weight).__name__, tuple(weight.shape), tuple(weight.to_local().shape), weight.grad is not None)",
        "ranks.stop()",
    ]
    notebook.open(cells, "ten")
    texts = dict(
        enumerate(
            (
                "2 ranks on",
                "I am 1",
                "tensor([3., 3.])",
                "rank 1 raised KeyError: 'missing' in line 2",
                "rank 1 did not come to all_reduce in line 2, where rank 0 waited",
                "{0: [3.0, 3.0], 1: [6.0, 6.0]}",
                None,
                "0.5",
                "Line2D",
                None,
                None,
                "DTensor (96, 32) (48, 32) True",
                "stopped; 0 processes left",
            )
        )
    )
    run_all(notebook, texts)
    notebook.picture("ranks")
    shown = [notebook.output(number).inner_text() for number in range(len(cells))]
    assert re.search(r"rank 0\s+I am 0\s+rank 1\s+I am 1", shown[1])
    assert re.search(r"ranks 0, 1\s+tensor", shown[2])  # the same once
    assert "Cell In[4], line 2" in shown[3]  # the fourth cell
    assert "Traceback" in shown[3] and "labkit/" not in shown[3]
    assert "new process group" in shown[4]
    assert notebook.output(8).locator("img").count() == 1
    assert not notebook.errors


def test_ranks_outlive_a_kernel_and_serve_another_notebook(notebook):
    again = ["import labkit\n'again'", "%load_ext labkit", "%%ranks\nkept"]
    again.append("ranks = labkit.ranks(run='latest')\nranks.pull('kept')")
    notebook.open([START.format(count=2, timeout=60), "%%ranks\nkept = 10 + rank", *again], "first")
    run_all(notebook, {0: "2 ranks on", 1: None})
    notebook.restart_kernel()
    run_all(notebook, {2: "again", 3: None, 4: "11", 5: "{0: 10, 1: 11}"})
    stop = "labkit.ranks(run='latest').stop()"
    notebook.open(["import labkit\n%load_ext labkit", "%%ranks\nkept += 1\nkept", stop], "second")
    run_all(notebook, {0: None, 1: "12", 2: "stopped; 0 processes left"})


def run_all(notebook, texts):
    """Run these cells, each until its output has the text."""
    for number, text in texts.items():
        notebook.run(number)
        notebook.idle()
        if text is not None:
            notebook.wait_for_text(number, text)


def test_an_interrupt_ends_the_cell_and_a_killed_rank_the_run(notebook):
    count = "%%ranks\nimport time\nfor second in range(100):\n    print('second', second)\n    time.sleep(1)"
    kill = "%%ranks --ranks 1\nimport os\nos.kill(os.getpid(), 9)"
    notebook.open([START.format(count=2, timeout=60), count, "%%ranks\nsecond < 50", kill], "interrupt")
    notebook.run(0)
    notebook.wait_for_text(0, "2 ranks on", 60)
    notebook.run(1)
    notebook.wait_for_text(1, "second 1", 30)  # while it runs
    notebook.interrupt()
    notebook.wait_for_text(1, "ranks 0, 1 raised KeyboardInterrupt", 20)
    notebook.run(2)
    notebook.wait_for_text(2, "True", 20)
    notebook.run(3)
    notebook.wait_for_text(3, "rank 1 was killed (SIGKILL)", 30)

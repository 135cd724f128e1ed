"""A lab whose mechanism is broken in one place fails, and says which claim is false. The rest of it is run as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PARTIAL = (
    'tensor=Script.load("tensor_parallel").cells["tensor"].text.replace("tensor, STYLES[style])", '
    '"tensor, RowwiseParallel(output_layouts=Partial()) if name == \\"down\\" else STYLES[style])")'
)
TWICE = (
    'scripts["DDP"].cells["model"].text.replace("return self.unembed(", '
    '"self.twice = [p * 1 for p in self.parameters()]; return self.unembed(")'
)
# (lab, text in one of its cells, what stands there instead, a claim that must be named)
BROKEN = [
    (
        "01_quickstart",
        "fsdp = labkit.launch(sharded, ",
        "fsdp = labkit.launch(sharded, seed=1, ",
        "the loss on two ranks, compared with one rank",
    ),
    ("02_collectives", "mine += arrived", "mine.copy_(arrived)", "ring: largest difference"),
    (
        "03_ddp",
        "    with model.no_sync():",
        "    if model:",
        "bytes in a step with no_sync",
    ),
    (
        "07_fsdp1_and_fsdp2",
        'each["step"] = each["step"].clone()',
        "pass",
        "the same, with a count for each parameter",
    ),
    (
        "09_scaling",
        "return ranks / (1 + serial * (ranks - 1))",
        "return ranks / (1 + serial * ranks)",
        "the article's table for DDP: largest distance from Amdahl's law with 5%",
    ),
    (
        "10_input_pipeline",
        "self.rank * worker.num_workers + worker.id, self.ranks * worker.num_workers",
        "worker.id, worker.num_workers",
        "the same by worker and rank",
    ),
    (
        "11_mixed_precision",
        '{"DDP": DistributedDataParallel(linear(device)), ',
        '{"DDP": linear(device), ',
        "DDP: ranks that see one's infinity",
    ),
    (
        "04_memory",
        "lab.launch(plan, steps=4, shown=False) for name, plan in plans.items()}",
        "lab.launch(plan, steps=4, shown=False) for name, plan in plans.items()}\n"
        f'runs["DDP"] = lab.launch(scripts["DDP"].with_cells(model={TWICE}), steps=4, trace_memory=True, '
        "global_batch_size=global_batch_size)",
        "DDP: peak",
    ),
    ("05_fsdp", '"never": (False, 1)', '"never": (True, 1)', "never: all-gathers"),
    (
        "12_activation_checkpointing",
        '"aten.addmm", "scaled_dot_product"',
        '"scaled_dot_product"',
        "selective: values saved",
    ),
    (
        "13_pipeline",
        "get_schedule_class(name)(",
        'get_schedule_class(name if len(stages) > 1 else "GPipe")(',
        "1F1B: ranks that hold as many micro-batches as predicted",
    ),
    (
        "14_tensor_parallel",
        'Script.load("tensor_parallel"), Script.load("single")',
        f'Script.load("tensor_parallel").with_cells({PARTIAL}), Script.load("single")',
        "loss",
    ),
    (
        "15_meshes",
        'sized(Script.load("hybrid"), width=64), sized',
        'sized(Script.load("hybrid"), width=64).with_cells(strategy=Script.load("hybrid").cells["strategy"]'
        '.text.replace("reshard_after_forward=False", "reshard_after_forward=True")), sized',
        "all-gathers of a rank in the same step",
    ),
    (
        "16_checkpoints",
        'for name in ("fsdp", "single"))\n',
        'for name in ("fsdp", "single"))\nscript = script.with_cells(main=script.cells["main"].text.replace('
        '"divmod(step, per_epoch)", "(step // per_epoch, 0)"))\n',
        "skipped or trained on twice",
    ),
    (
        "06_which_strategy",
        "lab.launch(planned, steps=7, shown=False)",
        'lab.launch(planned.script, steps=7, precision="bf16", global_batch_size=batch, trace_memory=True)',
        "fsdp: sent by all ranks in a step",
    ),
    (
        "17_profiling",
        'profiled("straggler", slow=slow_ms / 1000,',
        'profiled("straggler", slow=0.0,',
        "straggler: the rank that labkit names",
    ),
    (
        "18_when_it_breaks",
        'replaced(sound, "        dist.barrier()", "            dist.barrier()")',
        "sound",
        "four spaces: rank that called barrier",
    ),
    (
        "19_your_own_model",
        "    random = torch.Generator().manual_seed(0)",
        "    random = torch.Generator()\n    random.seed()",
        "largest relative difference to a loss",
    ),
    (
        "20_kaggle",
        'shutil.copytree(working[0] / "checkpoints", working[1] / "checkpoints")',
        '(working[1] / "checkpoints").mkdir()',
        "session 2",
    ),
    (
        "21_cluster",
        'name="two-nodes", wait=True, **options)',
        'name="two-nodes", wait=True, **options, seed=1)',
        "two nodes: largest difference of a loss",
    ),
    (
        "22_fine_tuning",
        'return Script.load(strategy, "precision", "checkpoints", "export", *extras, task="causal_lm")',
        'loaded = Script.load(strategy, "precision", "checkpoints", "export", *extras, task="causal_lm"); '
        'text = loaded.cells["checkpoints"].text; '
        'return loaded.with_cells(checkpoints=text.replace("ignore_frozen_params=self.adapter, ", ""))',
        "LoRA, DDP: numbers in a checkpoint",
    ),
    (
        "23_images",
        '{"weights": weights} if name.startswith("trained") else {}',
        "{}",
        "test loss from trained weights: how many times that from random ones",
    ),
    (
        "24_taken_apart",
        "parameter += 0.2 * parameter.grad",
        "parameter += 0",
        "after the repair: largest loss of any rank",
    ),
    (
        "25_long_context",
        'for name in ("single", "context_parallel"))\n',
        'for name in ("single", "context_parallel"))\nsplit = split.with_cells(strategy=split.cells["strategy"].text'
        '.replace("embedding.register_forward_pre_hook", "str"))\n',
        "gather: largest difference of a loss",
    ),
    (
        "26_talk_less",
        'width=32, layers=2)) for name in ("ddp", "diloco")}\n',
        'width=32, layers=2)) for name in ("ddp", "diloco")}\nscripts["diloco"] = scripts["diloco"].with_cells('
        'strategy=scripts["diloco"].cells["strategy"].text.replace("self.mean(start - p)", "start - p"))\n',
        "DiLoCo: sent by all ranks in a step",
    ),
    (
        "27_experts",
        "layers=blocks)) for way, script in task.items()}\n",
        'layers=blocks)) for way, script in task.items()}\nbroken = scripts["expert parallel"]\n'
        'scripts["expert parallel"] = broken.with_cells(experts=broken.cells["experts"].text'
        '.replace("torch.cat([part for rank in range(ranks) for part in parts[rank::ranks]])", "torch.cat(parts)"))\n',
        "largest difference of a loss to FSDP's",
    ),
    (
        "08_ddp_to_fsdp",
        "replaced(fsdp, units + made, made + units)",
        "fsdp",
        "optimizer first: mistakes that labkit.check finds",
    ),
]
QUICK = "02_collectives"  # the others take minutes together: make soak


@pytest.mark.parametrize(
    ("lab", "old", "new", "claim"),
    [pytest.param(*broken, id=broken[0], marks=[] if broken[0] == QUICK else pytest.mark.soak) for broken in BROKEN],
)
@pytest.mark.timeout(600)
def test_a_lab_whose_mechanism_is_broken_says_which_claim_is_false(tmp_path, lab, old, new, claim):
    book = jupytext.read(NOTEBOOKS / f"{lab}.py")
    cells = containing(old, book)
    cells[0].source = f"{cells[0].source}\n".replace(old, new).rstrip("\n")
    nbformat.write(book, tmp_path / f"{lab}.ipynb")

    run = [sys.executable, NOTEBOOKS / "run.py", "--small", "--into", tmp_path / "out", tmp_path / f"{lab}.ipynb"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode != 0
    told = re.search(rf"\d+ of \d+ claims of {lab} do not hold: (.*)", done.stdout + done.stderr)
    assert told, (done.stdout + done.stderr)[-3000:]
    assert claim in told[1]


def containing(text, book):
    """The code cells of a notebook with this text."""
    return [cell for cell in book.cells if cell.cell_type == "code" and text in f"{cell.source}\n"]


@pytest.mark.parametrize(("lab", "old"), [(lab, old) for lab, old, *_ in BROKEN])
def test_what_is_broken_is_in_one_cell_of_the_lab(lab, old):
    assert len(containing(old, jupytext.read(NOTEBOOKS / f"{lab}.py"))) == 1, "the lab has changed: break it elsewhere"


def test_every_lab_is_broken():
    assert {path.stem for path in NOTEBOOKS.glob("[0-9]*.py")} == {lab for lab, *_ in BROKEN}

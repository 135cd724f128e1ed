"""Plans of scripts that are not made of labkit's cells, against traces of the same scripts."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.planner import ScriptPlan

MODEL = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(128), nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 128), nn.Linear(128, 512)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = TensorDataset(torch.randint(0, 512, (512, 32)), torch.randint(0, 512, (512, 32)))
"""
LOOP = """
model = Net()
{wrapped}
loader = DataLoader(data, batch_size=8, sampler={sampler}, num_workers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        logits = model(x)
        loss = loss_of(logits, y)
        if not torch.isfinite(loss):
            raise SystemExit("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == y).sum().item()
        print(f"{{step}}: {{loss.item():.3f}} {{loss:.3f}}, {{right}} right")
        if step == 5:
            raise SystemExit
"""
JOINED = 'dist.init_process_group("gloo")\n'
SCRIPTS = {
    "loop": (1, MODEL + LOOP.format(wrapped="", sampler="None")),
    "ddp": (2, MODEL + JOINED + LOOP.format(wrapped="model = nn.parallel.DistributedDataParallel(model)",
                                            sampler="DistributedSampler(data)")),
    "fully_shard": (2, MODEL + JOINED + "from torch.distributed.fsdp import fully_shard\n" + LOOP.format(
        wrapped="[fully_shard(block) for block in model.blocks]; fully_shard(model)",
        sampler="DistributedSampler(data)")),
    "fsdp1": (2, MODEL + JOINED + "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
              "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n" + LOOP.format(
        wrapped="model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device('cpu'))",
        sampler="DistributedSampler(data)").replace(
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "model.clip_grad_norm_(1.0)")),
    "accelerate": (2, MODEL + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, loader = Net(), DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(accelerator.gather(loss.detach()).mean().item())
    if step == 11:
        break
"""),
    "lightning": (2, MODEL + """
import lightning


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, number):
        loss = loss_of(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", loss_of(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(max_steps=6, accelerator="cpu", devices=2, strategy="ddp")
trainer.fit(Training(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
"""),
    "trainer": (2, """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, number):
        ids = torch.arange(number, number + 32) % 500
        return {"input_ids": ids, "labels": ids}


config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=8, logging_steps=1, save_steps=4, report_to=[], use_cpu=True
)
Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Texts()).train()
"""),
}  # fmt: skip
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "trainer": "transformers"}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a script into an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_peak_is_that_of_a_traced_step(name, written, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    ranks, text = SCRIPTS[name]
    path = written(text)

    plan = labkit.plan(path, nproc_per_node=ranks)

    assert isinstance(plan, ScriptPlan) and plan.peak and not plan.is_real, plan
    assert [*tmp_path.iterdir()] == [path]  # it wrote nothing
    run = labkit.launch(plan, wait=True, runs_dir=tmp_path / "runs")
    for held in run.memory().ranks:
        assert held.traced, held.untraced
        assert plan.bytes == pytest.approx(held.traced.bytes, rel=0.01)
        for category in ("parameters", "gradients", "optimizer"):
            close = pytest.approx(held.traced.categories.get(category, 0), rel=0.05, abs=0.01 * plan.bytes)
            assert plan.peak.categories.get(category, 0) == close
    assert "as planned" in str(run.memory())


def test_what_other_strategies_would_hold_is_near_what_they_hold(written):
    plans = {}
    for name in ("ddp", "fully_shard"):
        ranks, text = SCRIPTS[name]
        plans[name] = labkit.plan(written(text), nproc_per_node=ranks)

    assert (plans["ddp"].strategy, plans["fully_shard"].strategy) == ("ddp", "fsdp")
    assert plans["ddp"].others["fsdp"].bytes == pytest.approx(plans["fully_shard"].bytes, rel=0.1)
    assert plans["fully_shard"].others["ddp"].bytes == pytest.approx(plans["ddp"].bytes, rel=0.1)
    assert [row["memory"][0] == "~" for row in plans["ddp"].rows] == [False, True, True, True]


def divided(name, freeze="", options=""):
    """A script whose model is divided by a strategy."""
    text = SCRIPTS["fully_shard" if name == "fsdp" else "ddp"][1].replace(
        "model = Net()\n", f"model = Net()\n{freeze}\n"
    )
    text = text.replace("DataParallel(model)", f"DataParallel(model{options})").replace("batch_size=8", "batch_size=1")
    if name != "zero1":
        return text
    shared = (
        "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\noptimizer = Zero(model.parameters(), "
    )
    return text.replace("optimizer = torch.optim.AdamW(model.parameters(),", f"{shared}torch.optim.AdamW,")


def test_what_is_gathered_of_frozen_parameters_is_derived_too(written):
    freeze = "model.embed.requires_grad_(False), model.blocks.requires_grad_(False)"
    plans = {name: labkit.plan(written(divided(name, freeze)), nproc_per_node=2) for name in ("ddp", "fsdp")}

    assert plans["ddp"].others["fsdp"].bytes == pytest.approx(plans["fsdp"].bytes, rel=0.1)


def test_a_model_without_blocks_is_gathered_whole(written):
    text = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Linear(512, 512)
model = nn.parallel.DistributedDataParallel(model) if "ddp" in sys.argv else fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ddp, fsdp = (labkit.plan(written(text), nproc_per_node=2, args=[name]) for name in ("ddp", "fsdp"))

    assert 1 <= ddp.others["fsdp"].bytes / fsdp.bytes < 1.15


def test_what_is_gathered_has_the_type_of_computation(written):
    text = divided("fsdp").replace("import fully_shard", "import MixedPrecisionPolicy, fully_shard")
    for wrapped in ("block", "model"):
        how = "mp_policy=MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=RESHARD"
        text = text.replace(f"fully_shard({wrapped})", f"fully_shard({wrapped}, {how})")
    fsdp, zero2 = (
        labkit.plan(written(text.replace("RESHARD", reshard)), nproc_per_node=4) for reshard in ("True", "False")
    )

    assert fsdp.others["zero2"].bytes == pytest.approx(zero2.bytes, rel=0.1)


@pytest.mark.parametrize(("device", "options"), [(None, ", gradient_as_bucket_view=True"), ("2xT4", "")])
def test_the_buckets_of_ddp_and_zero1_are_the_same(device, options, written):
    plans = {
        name: labkit.plan(written(divided(name, options=options)), nproc_per_node=2, device=device)
        for name in ("ddp", "zero1", "fsdp")
    }

    assert plans["ddp"].others["zero1"].bytes == pytest.approx(plans["zero1"].bytes, rel=0.06)
    assert plans["zero1"].others["ddp"].bytes == pytest.approx(plans["ddp"].bytes, rel=0.06)
    if not options:  # which a script without DDP does not tell
        assert plans["fsdp"].others["ddp"].bytes == pytest.approx(plans["ddp"].bytes, rel=0.06)


SCHEDULED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=False)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
for _ in range(3):
    def loss():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 64)).sum()
        loss.backward()
        return loss
    assert optimizer.step(loss) is not None
    schedule.step()
    optimizer.consolidate_state_dict(to=0)
    optimizer.state_dict()
"""


def test_zero_redundancy_optimizers_have_the_settings_of_the_real_one(written):
    plan = labkit.plan(written(SCHEDULED), nproc_per_node=2)

    assert plan.strategy == "zero1", plan.problems
    assert plan.peak.categories["optimizer"] == 2 * 4 * 64 * 64 + 4  # the weight; the bias is the other rank's


def test_unused_parameters_are_named_after_gradients_were_cleared(written):
    text = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Linear(8, 8)
model.spare = nn.Linear(8, 8, bias=False)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""

    (why,) = labkit.plan(written(text), nproc_per_node=2).problems

    assert why.startswith("DDP would stop in the second step: the loss does not depend on spare.weight. Use or freeze")


def test_an_installed_labkit_is_not_what_reads_values(written, tmp_path):
    installed = tmp_path / "site-packages" / "labkit"
    here = Path(labkit.__file__).parent
    shutil.copytree(here, installed, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(here.parent / "scripts", installed / "scripts")
    path = written(SCHEDULED.replace("return loss", "print(loss.item()); return loss"))
    planned = f"import labkit\nprint(labkit.__file__, labkit.plan({str(path)!r}, nproc_per_node=2).problems)"

    said = subprocess.run(
        [sys.executable, "-c", planned],
        env=os.environ | {"PYTHONPATH": str(installed.parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert said.startswith(str(installed))
    assert "it reads values from tensors (line 17), which are assumed to be 1, as of a loss" in said


def test_a_script_that_reads_values_is_computed_on_real_tensors(written):
    reading = LOOP.format(wrapped="", sampler="None").replace("loss_of(logits, y)", "loss_of(chosen(logits), y)")
    chosen = "def chosen(logits):\n    return logits[: int(logits.argmax(-1).max()) + 512]\n"
    whole = labkit.plan(written(SCRIPTS["loop"][1]), nproc_per_node=1)

    plan = labkit.plan(written(MODEL + chosen + reading), nproc_per_node=1)

    assert plan.is_real and plan.bytes == pytest.approx(whole.bytes, rel=0.01)
    assert "because it reads values of tensors in line 39 (`return logits[" in plan.problems[0]


def test_a_count_that_decides_a_size_is_not_assumed(written):
    sized = LOOP.format(wrapped="", sampler="None").replace(
        "loss_of(logits, y)", "loss_of(logits, y) + logits[: (logits.argmax(-1) == y).sum().item()].sum()"
    )

    assert labkit.plan(written(MODEL + sized), nproc_per_node=1).is_real


def test_masks_of_the_data_select_as_many_as_they_do(written):
    held = {}
    for most in (9, 512):
        chosen = f"F.cross_entropy(logits[y < {most}], y[y < {most}])"
        plan = labkit.plan(
            written(MODEL + LOOP.format(wrapped="", sampler="None").replace("loss_of(logits, y)", chosen)),
            nproc_per_node=1,
        )
        assert not plan.is_real and not any("assumed to select" in problem for problem in plan.problems)
        held[most] = plan.bytes

    logits = 8 * 32 * 512 * 4
    assert held[512] - held[9] > logits


def test_frameworks_tell_parameters_apart_by_their_addresses(written):
    pytest.importorskip("accelerate")
    sharded = SCRIPTS["accelerate"][1].replace(
        "Accelerator(cpu=True,", "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),"
    )
    path = written(sharded.replace("import Accelerator", "import Accelerator, FullyShardedDataParallelPlugin"))

    plan = labkit.plan(path, nproc_per_node=2, device="2xT4")

    assert not plan.is_real and plan.strategy == "fsdp"
    held = plan.peak.categories
    assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=0.01)


def test_a_model_made_without_memory_gets_none_in_a_plan_either(written):
    path = written("""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(64)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(2, 16384, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")

    plan = labkit.plan(path, nproc_per_node=8, device="8xA100 80")

    whole = 64 * 4 * (16384 * 16384 + 16384)  # 64 GiB
    assert plan.peak and not plan.is_real, plan
    assert plan.peak.categories["parameters"] == pytest.approx(whole / 8, rel=0.01)
    assert plan.peak.categories["optimizer"] == pytest.approx(2 * whole / 8, rel=0.01)


def test_a_script_that_does_not_step_twice_is_refused_in_a_sentence(written):
    text = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('count', type=int)\n"
    path = written(text + "print(parser.parse_args().count)\n")

    missing, none = labkit.plan(path, nproc_per_node=1), labkit.plan(path, nproc_per_node=1, args=[3])

    assert missing.fits is None and "cannot be planned" in str(missing)
    (why,) = missing.problems
    assert why.startswith("it exited with 2 before its second optimizer step: train.py: error: the following")
    assert none.problems == ("it ended after 0 optimizer steps, and a plan needs two",)


def test_a_plan_changes_no_file(written, tmp_path):
    keep = tmp_path / "keep.txt"
    keep.write_text("kept")
    text = SCRIPTS["loop"][1].replace("model = Net()", "open('log.txt', 'w').write('x')\n{}\nmodel = Net()", 1)
    appending = "assert open('log.txt').read() == 'x'\nos.makedirs('out/a')\nopen('keep.txt', 'a').write('!')\n"
    appending += "assert open('keep.txt').read() == 'kept!'"

    plan = labkit.plan(written(text.replace("{}", appending, 1)), nproc_per_node=1)
    removing = labkit.plan(written(text.replace("{}", "os.remove('keep.txt')", 1)), nproc_per_node=1)
    starting = labkit.plan(written(text.replace("{}", "os.system('touch started')", 1)), nproc_per_node=1)

    assert plan.peak and not plan.is_real
    assert f"before its second step it writes {tmp_path / 'keep.txt'}, {tmp_path / 'log.txt'}" in plan.problems[-1]
    assert removing.peak is None and "a plan changes no file: os.remove of 'keep.txt'" in removing.problems[0]
    assert starting.peak is None and "a plan starts no other program" in starting.problems[0]
    assert {path.name for path in tmp_path.iterdir()} == {"keep.txt", "train.py"} and keep.read_text() == "kept"


@pytest.mark.parametrize(
    ("library", "writing"),
    [
        ("safetensors", "from safetensors.torch import save_file\nsave_file({'a': torch.zeros(2)}, 'mine')"),
        ("sqlite3", "import sqlite3\nsqlite3.connect('mine').execute('create table t(a)')"),
        ("pyarrow", "import pyarrow, pyarrow.parquet\npyarrow.parquet.write_table(pyarrow.table({'a': [1]}), 'mine')"),
    ],
)
def test_what_libraries_write_themselves_is_refused_by_the_kernel(library, writing, written, tmp_path):
    pytest.importorskip(library)
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("this kernel has no Landlock")
    mine = tmp_path / "mine"
    mine.touch()
    text = SCRIPTS["loop"][1].replace("model = Net()", f"{writing}\nmodel = Net()", 1)
    plan = labkit.plan(written(text), nproc_per_node=1)
    assert plan.problems[0].endswith("; a plan lets only Python's own functions write files")
    assert mine.read_bytes() == b""
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "train.py"}


def test_what_is_kept_apart_is_moved_cut_and_removed(written, tmp_path):
    keeping = """
import shutil, tempfile
from multiprocessing.shared_memory import SharedMemory
os.makedirs("out/new")
with open("out/new/a", "wb") as file:
    file.write(b"12345")
    file.flush()
    os.ftruncate(file.fileno(), 2)
os.replace("out/new/a", "out/a")
assert open("out/a").read() == "12"
with tempfile.NamedTemporaryFile("w", delete=False) as file:
    file.write("b")
os.replace(file.name, "a")
shutil.rmtree("out")
memory = SharedMemory(create=True, size=10)
memory.close()
memory.unlink()
"""
    plan = labkit.plan(
        written(SCRIPTS["loop"][1].replace("model = Net()", f"{keeping}model = Net()", 1)), nproc_per_node=1
    )
    assert plan.peak
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}


def test_a_plan_for_gpus_takes_a_script_that_needs_them(written):
    text = JOINED.replace("gloo", "nccl") + (
        "local = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(local)\nscaler = torch.amp.GradScaler('cuda')\n"
    ) + LOOP.format(
        wrapped="model = torch.compile(nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[local]))",
        sampler="DistributedSampler(data)",
    ).replace("logits = model(x)", "x, y = x.to(f'cuda:{local}', non_blocking=True), y.cuda()\n"
              "        with torch.autocast('cuda', dtype=torch.float16):\n            logits = model(x)"
    ).replace("loss.backward()", "scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)"
    ).replace("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()")  # fmt: skip
    path = written(MODEL + text)

    plan = labkit.plan(path, nproc_per_node=2, device="2xT4")
    here = labkit.plan(path, nproc_per_node=2)

    assert plan.peak and not plan.is_real and plan.strategy == "ddp" and plan.fits
    assert any("compile is not planned" in problem for problem in plan.problems)
    assert here.peak is None  # this machine's plan tells that the launch would fail


def test_a_plan_is_launched_with_its_ranks_and_arguments_only(written):
    plan = labkit.plan(written("import sys\nprint(sys.argv)\n"), nproc_per_node=1, args=["a b"])

    with pytest.raises(labkit.LaunchError, match="this plan is for 1 ranks with the arguments a b"):
        labkit.launch(plan, nproc_per_node=2)


def test_it_shows_itself_as_text_and_html(written):
    bundle = labkit.plan(written(SCRIPTS["ddp"][1]), nproc_per_node=2)._repr_mimebundle_()

    assert bundle["text/plain"].startswith("train.py on 2 ranks of this machine needs ")
    assert "derived" in bundle["text/html"] and "<svg" in bundle["text/html"] or "<img" in bundle["text/html"]


def test_the_command_line_takes_the_arguments_of_a_script(written, capsys):
    from labkit.cli import main

    path = written("import sys\nraise SystemExit(' '.join(sys.argv[1:]))\n")

    assert main(["plan", str(path), "--nproc-per-node", "2", "--", "50", "--lr", "1e-3"]) == 2
    assert "50 --lr 1e-3" in capsys.readouterr().out


def test_arguments_of_one_of_labkits_scripts_are_its_parameters():
    plan = labkit.plan("ddp", nproc_per_node=2, args=["--precision", "bf16", "--activation-checkpointing"])

    assert plan.parameters == {"precision": "bf16", "activation_checkpointing": True}

"""Training loops as people write them, in parts that fit together: what generated.py makes scripts of."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

HEAD = '''"""{title}"""
import atexit, csv, json, logging, os, queue, signal, subprocess, sys, threading, time
from collections import Counter
from datetime import timedelta
from pathlib import Path

FOLDER = Path(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, PASSES, WORKERS, PACE, GROUP_TIMEOUT = {steps}, {passes}, {workers}, {pace}, {group_timeout}
MOMENT, AT, CULPRIT = {moment!r}, {at}, {culprit}
ONCE = ("import", "start", "evaluation", "checkpoint", "end", "exit")
FACTOR = 1.0
calls, skipped = Counter(), set()


def misbehave():
    global FACTOR
{fault}


def at(moment):
    """Each moment of a step comes once a step."""
    calls[moment] += 1
    if RANK == CULPRIT and (moment, calls[moment]) == (MOMENT, 1 if moment in ONCE else AT):
        misbehave()


{logger}


def done(loss):
    """A step has been made."""
    calls["steps"] += 1
    with open(FOLDER / f"losses-{{RANK}}", "a") as file:
        file.write(json.dumps(loss) + "\\n")
    tell(calls["steps"], float("nan") if loss is None else loss)
    time.sleep(PACE)


atexit.register(at, "exit")
at("import")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        at("in optimizer")
        return super().step(closure)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)  # all ranks begin with the same weights
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return self.layers(x) * FACTOR


class Data(Dataset):
    def __init__(self, batches=STEPS * PASSES):
        self.batches = batches

    def __len__(self):
        return 4 * self.batches

    def __getitem__(self, index):
        if MOMENT == "data" and RANK == CULPRIT and index == 4 * AT * PASSES - 2:
            misbehave()
        return torch.randn(6), torch.randint(0, 4, ())


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(6), torch.randint(0, 4, ())


def evaluate(model):
    with torch.no_grad():
        for x, y in DataLoader(Data(2), batch_size=4):
            model(x)
    at("evaluation")


def save(model):
    torch.save({{"step": calls["steps"]}}, FOLDER / f"{{RANK}}.partial")
    at("checkpoint")
    os.rename(FOLDER / f"{{RANK}}.partial", FOLDER / f"{{RANK}}.pt")


torch.manual_seed(RANK)
'''

LOGGERS = {
    "print": 'def tell(step, loss):\n    print(f"step {step}: loss {loss:.4f}", flush=True)',
    "logging": (
        'logging.basicConfig(level="INFO")\n\n\n'
        'def tell(step, loss):\n    logging.getLogger("train").info("step %d of %d, loss %.4f", step, STEPS, loss)'
    ),
    "progress bar": (
        "def tell(step, loss):\n"
        '    print(f"\\r{step}/{STEPS} [{step * \'#\':8}] loss={loss:.3g}", end="", file=sys.stderr, flush=True)'
    ),
    "csv": (
        "def tell(step, loss):\n"
        '    with open(FOLDER / f"log-{RANK}.csv", "a") as file:\n'
        "        csv.writer(file).writerow([step, loss])"
    ),
    "none": "def tell(step, loss):\n    pass",
    "service": """entries = queue.Queue()


def upload():
    while (entry := entries.get()) is not None:
        (FOLDER / f"uploaded-{RANK}").write_text(json.dumps(entry))


uploader = threading.Thread(target=upload, daemon=True)
uploader.start()


@atexit.register
def finish():
    entries.put(None)
    uploader.join()


def tell(step, loss):
    entries.put({"step": step, "loss": loss})""",
}

SOURCES = {
    "DataLoader": "loader = DataLoader(Data(), batch_size=4, num_workers=WORKERS)",
    "epochs": "loader = DataLoader(Data(2), batch_size=4, num_workers=WORKERS, persistent_workers=WORKERS > 0)",
    "IterableDataset": "loader = DataLoader(Stream(), batch_size=4, num_workers=WORKERS)",
    "tensors": "loader = [(torch.randn(4, 6), torch.randint(0, 4, (4,))) for _ in range(3)]",
}
OWN_LOOP = """
at("start")
{init}
{source}
{setup}


def endless():
    while True:
        yield from loader


batches = endless()
for step in range(1, STEPS + 1):
    at("before backward")
{update}
    done(loss if loss is None else float(loss))
{logs}    if step == AT:
        evaluate(model)
        save(model)
at("end")
{end}
"""
LOGS = """    at("logging")
    if "logging" not in skipped:
        dist.all_reduce(torch.ones(1))
    skipped.clear()
"""
INIT = 'dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))'
DESTROY = "dist.destroy_process_group()"
BARRIER = f"dist.barrier()\n{DESTROY}"

BY_HAND = """

def synchronize():
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= WORLD


"""
DDP = "model = nn.parallel.DistributedDataParallel({})\noptimizer = SGD(model.parameters(), lr=0.1)"
SIMPLE = """
x, y = next(batches)
optimizer.zero_grad()
loss = cross_entropy(model(x), y)
loss.backward()
at("after backward")
optimizer.step()
"""
SYNCHRONIZED = SIMPLE.replace("optimizer.step()", "synchronize()\noptimizer.step()")
ACCUMULATED = """
loss = 0.0
for part in range(PASSES):
    x, y = next(batches)
    with nullcontext() if part == PASSES - 1 else model.no_sync():
        micro_loss = cross_entropy(model(x), y) / PASSES
        micro_loss.backward()
    loss += micro_loss.item()
at("after backward")
optimizer.step()
optimizer.zero_grad()
"""
ACCELERATE_SETUP = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
net, loader = Net(), DataLoader(Data(2 * PASSES * WORLD), batch_size=4, num_workers=WORKERS)
model, optimizer, loader = accelerator.prepare(net, SGD(net.parameters(), lr=0.1), loader)
"""
ACCELERATE = """
mean = 0.0
for part in range(PASSES):
    x, y = next(batches)
    with accelerator.accumulate(model):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        mean += loss.item() / PASSES
        if part == PASSES - 1:
            at("after backward")
        optimizer.step()
        optimizer.zero_grad()
loss = mean
"""
LBFGS_SETUP = f"model = Net()\noptimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3){BY_HAND}"
LBFGS = """
x, y = next(batches)
evaluations = []
def closure():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    if not evaluations:
        at("after backward")
    synchronize()
    evaluations.append(loss.item())
    return loss
loss = optimizer.step(closure)
"""
GAN_SETUP = """
model, generator = nn.Linear(6, 1), nn.Linear(3, 6)
for p in (*model.parameters(), *generator.parameters()):
    dist.broadcast(p.data, src=0)
optimizer, of_generator = SGD(model.parameters(), lr=0.1), torch.optim.Adam(generator.parameters())
""" + BY_HAND.replace("()", "(network)", 1).replace("model.", "network.")
GAN = """
x, _ = next(batches)
fake = generator(torch.randn(4, 3))
optimizer.zero_grad()
mse_loss(model(x), torch.ones(4, 1)).backward()
mse_loss(model(fake.detach()), torch.zeros(4, 1)).backward()
at("after backward")
synchronize(model)
optimizer.step()
if STEPS % 2 or step % 2 == 0:  # the generator may be trained less often
    of_generator.zero_grad()
    mse_loss(model(fake), torch.ones(4, 1)).backward()
    synchronize(generator)
    of_generator.step()
loss = None
"""
RL = """
with torch.no_grad():
    states, rewards = [torch.randn(1, 6)], []
    for _ in range(5):
        action = torch.distributions.Categorical(logits=model(states[-1])).sample()
        rewards.append(float(action == 1))
        states.append(states[-1] * 0.9 + 0.1 * action)
policy = torch.distributions.Categorical(logits=model(torch.cat(states[:-1])))
loss = -(policy.log_prob(policy.sample()) * torch.tensor(rewards)).mean()
optimizer.zero_grad()
loss.backward()
at("after backward")
synchronize()
optimizer.step()
"""
IN_BACKWARD_SETUP = """
model = Net()
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def update(p):
    dist.all_reduce(p.grad)
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
"""
IN_BACKWARD = 'x, y = next(batches)\nloss = cross_entropy(model(x), y)\nloss.backward()\nat("after backward")\n'
SCALED = SIMPLE.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
    "optimizer.step()", "scaler.step(optimizer)\nscaler.update()"
)
SECOND = "if step == STEPS // 2 + 1:\n    earlier = {kept}\n" + indent(DDP.format("Net()"), "    ") + SIMPLE


@dataclass(frozen=True)
class Shape:
    """A loop written by hand: how it is set up, and what it does in a step."""

    setup: str
    update: str
    init: str = INIT
    sources: tuple[str, ...] = (*SOURCES,)
    passes: tuple[int, ...] = (1,)
    moments: tuple[str, ...] = ("before backward", "after backward", "in optimizer", "evaluation", "checkpoint")
    end: tuple[str, ...] = (DESTROY, BARRIER)


WITHOUT_OPTIMIZER = ("before backward", "after backward", "evaluation", "checkpoint")
HAND = f"model = Net()\noptimizer = SGD(model.parameters(), lr=0.1){BY_HAND}"
SHAPES = {
    "plain": Shape(DDP.format("Net()"), SIMPLE),
    "by hand": Shape(HAND, SYNCHRONIZED),
    "accelerate": Shape(ACCELERATE_SETUP, ACCELERATE, init="", sources=("epochs",), passes=(1, 2),
                        end=("accelerator.end_training()", "")),
    "LBFGS": Shape(LBFGS_SETUP, LBFGS, moments=WITHOUT_OPTIMIZER),
    "GAN": Shape(GAN_SETUP, GAN),
    "RL": Shape(HAND, RL, sources=("tensors",)),
    "IterableDataset": Shape(DDP.format("Net()"), SIMPLE, sources=("IterableDataset",)),
    "optimizer in backward": Shape(IN_BACKWARD_SETUP, IN_BACKWARD, moments=WITHOUT_OPTIMIZER),
    "compiled": Shape(DDP.format('torch.compile(Net(), backend="aot_eager")'), SIMPLE),
    "accumulation": Shape("from contextlib import nullcontext\n" + DDP.format("Net()"), ACCUMULATED, passes=(2, 3)),
    "two trainings": Shape(DDP.format("Net()"), SECOND),
    "gradient scaler": Shape(DDP.format("Net()") + '\nscaler = torch.amp.GradScaler("cpu")', SCALED),
    "FSDP": Shape("from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(Net())\n"
                  "optimizer = SGD(model.parameters(), lr=0.1)", SIMPLE),
}  # fmt: skip

LIGHTNING = """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Net(), []

    def training_step(self, batch, index):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation_loss", cross_entropy(self.net(x), y), sync_dist=True)
        at("evaluation")

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch, index):
        if index % PASSES == 0:
            at("before backward")

    def on_before_optimizer_step(self, optimizer):
        at("after backward")

    def on_train_batch_end(self, outputs, batch, index):
        if index % PASSES == PASSES - 1:
            done(sum(self.losses) / PASSES)
            self.losses.clear()

    def on_save_checkpoint(self, checkpoint):
        at("checkpoint")


at("start")
trainer = L.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=WORLD, strategy="ddp", accumulate_grad_batches=PASSES,
    val_check_interval=AT * PASSES, limit_val_batches=1, num_sanity_val_steps=0, default_root_dir=FOLDER, logger=False,
    callbacks=[ModelCheckpoint(FOLDER / "saved", every_n_train_steps=AT)], enable_progress_bar={bar},
)
trainer.fit(
    Module(), DataLoader(Data(STEPS * PASSES * WORLD), batch_size=4, num_workers=WORKERS), DataLoader(Data(), 4)
)
at("end")
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
{imports}


class Moments(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        at("before backward")

    def on_pre_optimizer_step(self, *args, **kwargs):
        at("after backward")

    def on_step_end(self, *args, **kwargs):
        done(sum(losses))
        losses.clear()

    def on_evaluate(self, *args, **kwargs):
        at("evaluation")

    def on_save(self, *args, **kwargs):
        at("checkpoint")


class Watched({trainer}):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        losses.append(loss.item())
        return loss


losses = []
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2,
                                   bos_token_id=1, eos_token_id=1, pad_token_id=0))
{data}
at("start")
arguments = {arguments}(
    str(FOLDER / "out"), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=PASSES,
    logging_steps=1, eval_strategy="steps", eval_steps=AT, save_strategy="steps", save_steps=AT, report_to=[],
    use_cpu=True, ddp_backend="gloo", disable_tqdm=not {bar}, dataloader_num_workers=WORKERS, {options}
)
trainer = Watched(
    model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Moments()],
    optimizers=(SGD(model.parameters(), lr=0.1), None), {more}
)
trainer.train()
at("end")
"""
HUGGING_FACE = {
    "imports": "from transformers import Trainer, TrainingArguments",
    "trainer": "Trainer",
    "arguments": "TrainingArguments",
    "data": 'data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 40, (64, 12))]',
    "options": "bf16=False",
    "more": "",
}
SFT = {
    "imports": """from datasets import Dataset as Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer""",
    "trainer": "SFTTrainer",
    "arguments": "SFTConfig",
    "data": """words = ["<pad>", "<end>", *(f"w{i}" for i in range(38))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="w0")
data = Table.from_list([{"text": " ".join(words[2 + i % 20 : 5 + i % 20 + i % 9])} for i in range(64)])""",
    "options": "bf16=False, max_length=12",
    "more": "processing_class=tokenizer",
}
FRAMEWORKS = ("Lightning", "Trainer", "SFTTrainer")


def loop_of(name: str, source: str, end: str, keeps: bool, bar: bool, logs: bool) -> str:
    """The part of a script below HEAD; `bar`: with the framework's progress bar; `logs`: with an all_reduce a step."""
    if name == "Lightning":
        return LIGHTNING.replace("{bar}", str(bar))
    if name not in SHAPES:
        return TRAINER.format(**(SFT if name == "SFTTrainer" else HUGGING_FACE), bar=bar)
    shape = SHAPES[name]
    update = indent(shape.update.replace("{kept}", "optimizer" if keeps else "None").strip("\n"), "    ")
    return OWN_LOOP.format(
        init=shape.init, source=SOURCES[source], setup=shape.setup.strip("\n"), update=update, end=end,
        logs=LOGS if logs else "",
    )  # fmt: skip

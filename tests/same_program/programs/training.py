# Trainings on torch, with and without its process groups and libraries.

# %% plain_loop
import torch
torch.manual_seed(0)
m = torch.nn.Linear(4, 1); o = torch.optim.AdamW(m.parameters(), lr=.1)
for step in range(30):
    l = m(torch.randn(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
    print(step, l.item(), torch.is_grad_enabled())
torch.save(m.state_dict(), "model.pt")
print(sorted(vars(m)), sorted(vars(o)), o.state_dict()["param_groups"])

# %% data_loader
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
data = TensorDataset(torch.arange(20.).reshape(20, 1))
for workers in (0, 2):
    loader = DataLoader(data, batch_size=6, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(2))
    print([b[0].flatten().tolist() for b in loader], len(loader), sorted(vars(iter(loader)))[:0])

# %% worker_info
import os, torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info(); yield from ((info.id, i, sorted(n for n in os.environ if "GUEST" in n)) for i in range(2))
print([*DataLoader(Stream(), batch_size=None, num_workers=2)])

# %% worker_raises
import torch
from torch.utils.data import DataLoader
class Bad(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): raise IndexError(f"bad sample")
for batch in DataLoader(Bad(), num_workers=1): pass

# %% ddp
# ranks 2
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo"); torch.manual_seed(0)
m = DistributedDataParallel(torch.nn.Linear(4, 1)); o = torch.optim.SGD(m.parameters(), lr=.1)
torch.manual_seed(dist.get_rank())
for step in range(20):
    l = m(torch.randn(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
    value = l.detach().clone(); dist.all_reduce(value); print(step, value.item(), l.item())
log = open(f"log-{dist.get_rank()}", "w"); log.write("unflushed")
dist.destroy_process_group()

# %% ddp_without_destroying
# ranks 2
import torch, torch.distributed as dist
dist.init_process_group("gloo"); torch.manual_seed(0)
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1)); o = torch.optim.SGD(m.parameters(), lr=.1)
for step in range(20):
    l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
print(l.item())
import atexit; atexit.register(print, "atexit")

# %% ddp_one_fails
# ranks 2
import torch, torch.distributed as dist, time
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(.3); raise ValueError("rank 1")
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print("peer gone"); raise SystemExit(3)

# %% fsdp
# ranks 2
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo"); torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)); fully_shard(m); o = torch.optim.AdamW(m.parameters(), lr=.01)
for step in range(5):
    l = m(torch.ones(4, 8)).pow(2).mean(); o.zero_grad(); l.backward(); o.step(); print(l.item())
print({k: v.full_tensor().sum().item() for k, v in m.state_dict().items()})
dist.destroy_process_group()

# %% collectives_by_hand
# ranks 2
import torch, torch.distributed as dist
dist.init_process_group("gloo"); r = dist.get_rank()
out = [torch.zeros(1) for _ in range(2)]; dist.all_gather(out, torch.tensor([float(r)])); print(out)
objects = [None, None]; dist.all_gather_object(objects, {"rank": r}); print(objects)
work = dist.all_reduce(t := torch.ones(3) * (r + 1), async_op=True); work.wait(); print(t, dist.get_backend(), dist.get_world_size())
dist.monitored_barrier(); dist.destroy_process_group(); print(dist.is_initialized())

# %% async_work_left
# ranks 2
import torch, torch.distributed as dist
dist.init_process_group("gloo")
works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
print("left")

# %% error_record
# ranks 2
import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "0": raise ValueError("recorded")
    import time; time.sleep(20)
main()

# %% loss_in_place
# ranks 2
import torch, torch.distributed as dist
dist.init_process_group("gloo"); torch.manual_seed(0)
m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
for step in range(5):
    l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward()
    with torch.no_grad(): dist.all_reduce(l); l.div_(2)
    o.step(); print(l.item(), l.requires_grad, l.grad_fn is not None, hasattr(l, "_labkit_unscaled"))
dist.destroy_process_group()

# %% hooks_of_ones_own
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
seen = []
handle = register_optimizer_step_post_hook(lambda o, a, k: seen.append(type(o).__name__))
m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
original = torch.autograd.backward
def mine(*a, **k): seen.append("backward"); return original(*a, **k)
torch.autograd.backward = mine
m(torch.ones(1, 2)).sum().backward(); o.step(); print(seen)
o.register_step_pre_hook(lambda o, a, k: seen.append("own")); o.step(); print(seen, torch.autograd.backward is mine)

# %% grad_scaler
import torch
torch.manual_seed(0)
m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=.1); s = torch.amp.GradScaler("cpu")
for step in range(3):
    with torch.autocast("cpu"): l = m(torch.ones(4, 2)).pow(2).mean()
    o.zero_grad(); s.scale(l).backward(); s.unscale_(o); print(s.step(o)); s.update(); print(l.item(), s.get_scale())

# %% lbfgs
import torch
torch.manual_seed(0)
m = torch.nn.Linear(2, 1); o = torch.optim.LBFGS(m.parameters(), max_iter=4)
def closure():
    o.zero_grad(); l = (m(torch.ones(4, 2)) - 1).pow(2).mean(); l.backward(); return l
for _ in range(3): print(o.step(closure).item())

# %% compiled
import torch
torch.manual_seed(0)
@torch.compile(backend="eager")
def f(x): return (x * 2).sum()
x = torch.ones(3, requires_grad=True); f(x).backward(); print(x.grad, torch._dynamo.utils.counters["stats"]["unique_graphs"])

# %% anomaly
import torch
with torch.autograd.detect_anomaly():
    x = torch.zeros(1, requires_grad=True); y = (x / 0 * 0).sum()
    y.backward()

# %% autograd_error
import torch
x = torch.ones(2, requires_grad=True); y = (x * 2).sum(); y.backward(); y.backward()

# %% backward_forms
import torch
x = torch.ones(2, requires_grad=True); (x * 3).sum().backward(retain_graph=True); print(x.grad)
torch.autograd.backward([(x * 2).sum(), (x * 5).sum()]); print(x.grad, torch.autograd.grad((x ** 2).sum(), x, create_graph=True))
import inspect; print(inspect.signature(torch.autograd.backward), torch.autograd.grad.__name__, torch.autograd.grad.__module__)

# %% spawns_ranks_itself
import torch, torch.multiprocessing as mp, torch.distributed as dist, os
def train(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False"); dist.init_process_group("gloo", rank=rank, world_size=2)
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)); o = torch.optim.SGD(m.parameters(), lr=.1)
    for _ in range(3): m(torch.ones(1, 2)).sum().backward(); o.step()
    rank or print("trained"); dist.destroy_process_group()
if __name__ == "__main__":
    import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]; s.close()
    mp.spawn(train, (port,), nprocs=2)

# %% forked_child_trains
# leaves something running
import os, torch, torch.multiprocessing as mp
def train(m, n):
    o = torch.optim.SGD(m.parameters(), lr=.01)
    for _ in range(n): l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
    open(f"child-{n}", "w").write("done")
if __name__ == "__main__":
    m = torch.nn.Linear(4, 1); m.share_memory()
    ps = [mp.get_context("fork").Process(target=train, args=(m, n)) for n in (3, 5)]
    [p.start() for p in ps]; [p.join() for p in ps]; print([p.exitcode for p in ps])

# %% file_system_sharing
# leaves something running
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
mp.set_sharing_strategy("file_system")
class D(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return torch.full((5000,), float(i))
keep = [b.sum().item() for b in DataLoader(D(), batch_size=8, num_workers=2)]; mine = torch.zeros(3000).share_memory_(); print(keep)

# %% compiled_step
import torch, logging, sys
torch.manual_seed(0); m = torch.nn.Linear(4, 4); o = torch.optim.Adam(m.parameters(), lr=torch.tensor(.01)); loader = torch.utils.data.DataLoader(torch.rand(8, 4), batch_size=4)
metrics = logging.getLogger("metrics"); metrics.setLevel("INFO"); metrics.addHandler(logging.StreamHandler(sys.stdout))
@torch.compile(backend="eager")
def train(x):
    loss = m(x).sum(); loss.backward(); o.step(); o.zero_grad(); metrics.info({"x": 1})
    return loss
@torch.compile(backend="eager")
def epoch(): return sum(m(x).sum() for x in loader), logging.getLogger("other").name
print([train(torch.rand(2, 4)).item() for _ in range(4)], epoch())

# %% sets_modes
import copy, inspect, torch; from torch import nn
m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(.5)); scripted = torch.jit.script(m); scripted.eval()
@torch.compile(backend="eager", fullgraph=True)
def train(x): m.train(); return m(x).sum()
@torch.compile(backend="eager", fullgraph=True)
def evaluate(x): m.eval(); return m(x).sum()
class Own(nn.Module):
    def __init__(self): super().__init__(); self.layer = nn.Linear(2, 2)
    def train(self, mode=True): super().train(mode); self.layer.eval(); return self
train(torch.rand(2, 4)); print(m.training, scripted.training, copy.deepcopy(m).training); evaluate(torch.rand(2, 4)); o = Own().train()
print(m.training, o.training, o.layer.training, inspect.signature(nn.Module.train), nn.Module.train.__qualname__)

# %% profiled_and_traced
import cProfile, collections, profile, pstats, sys, torch
torch.manual_seed(0); loader = torch.utils.data.DataLoader(torch.rand(8, 4), batch_size=2)
def train(): m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1); epoch(m, o)
def epoch(m, o):
    for x in loader: step(m, o, x)
def step(m, o, x): o.zero_grad(); m(x).sum().backward(); o.step()
for kind in (cProfile, profile):
    profiler = kind.Profile(); profiler.runcall(train)
    print({name: calls[0] for (file, _, name), calls in sorted(pstats.Stats(profiler).stats.items()) if file == __file__})
    print({name: calls[0] for (file, _, name), calls in pstats.Stats(profiler).stats.items() if name in ("run_backward", "pin_memory")})
events = collections.Counter()
def trace(frame, event, arg): events[event, frame.f_code.co_name] += frame.f_code.co_filename == __file__; return trace
sys.settrace(trace); train(); sys.settrace(None); print(sorted((*k, n) for k, n in events.items() if n))

# %% uses_tensorboard
import time, torch
from torch.utils.tensorboard import SummaryWriter
w = SummaryWriter("tb"); [w.add_scalar("loss", 1 / (i + 1), i) for i in range(5)]; print("not closed"); time.sleep(0.5)  # for its thread, or it is a race

# %% logs_to_trackers_of_its_own
import inspect, pickle, threading, time, torch, traceback
from torch.utils.tensorboard import SummaryWriter
m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
class Mine(SummaryWriter):
    def add_scalar(self, tag, *args, **kwargs): print([f.function for f in inspect.stack()]); return super().add_scalar("my/" + tag, *args, **kwargs)
plain, mine = SummaryWriter("tb"), Mine("mine")
print(inspect.signature(SummaryWriter.add_scalar), pickle.loads(pickle.dumps(SummaryWriter.add_scalar)) is SummaryWriter.add_scalar, inspect.getsource(SummaryWriter.add_scalars)[:25])
for s in range(5):
    l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step(); print(plain.add_scalar("loss", l, s), mine.add_scalar("loss", l.item(), global_step=s))
t = threading.Thread(target=plain.add_scalars, args=("both", {"a": 1, "b": torch.tensor(2.)}, 5)); t.start(); t.join()
for arguments in ((), ("d", "no number", 1), ("e", torch.ones(2), 1), ("f", None)):
    try: plain.add_scalar(*arguments)
    except BaseException as error: print(type(error).__name__, error, [f.name for f in traceback.extract_tb(error.__traceback__)])
original = SummaryWriter.add_scalar
SummaryWriter.add_scalar = lambda self, tag, *rest: (print("patched"), original(self, tag, *rest))[1]
plain.add_scalar("g", 7, 1); plain.close(); mine.close()

# %% logs_to_disabled_wandb
# env WANDB_MODE=disabled
# needs wandb
import torch, wandb
run = wandb.init(); m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
for s in range(5):
    l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step(); print(wandb.log({"loss": l}), run.log({"n": {"a": 1}}, step=s))
try: run.log(3)
except Exception as error: print(type(error).__name__, error)
wandb.finish()

# %% training_thread_raises
import threading, torch
def train():
    m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
    for s in range(40):
        l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
        if s == 10: raise ValueError("boom in thread")
t = threading.Thread(target=train, name="trainer"); t.start(); t.join(); print("main done")

# %% deterministic
# env CUBLAS_WORKSPACE_CONFIG=:4096:8
import torch
torch.use_deterministic_algorithms(True); torch.manual_seed(0)
print(torch.nn.functional.conv2d(torch.randn(1, 3, 8, 8), torch.randn(2, 3, 3, 3)).sum().item(), torch.are_deterministic_algorithms_enabled())

# %% profiler
import torch
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU]) as p: torch.ones(4, 4) @ torch.ones(4, 4)
print(sorted({e.key for e in p.key_averages()}))

# %% dispatch_mode
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Count(TorchDispatchMode):
    names = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): self.names.append(str(func)); return func(*args, **(kwargs or {}))
m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=.1, foreach=False)
with Count():
    m(torch.ones(1, 2)).sum().backward(); o.step()
print(Count.names)

# %% uses_accelerate
# ranks 2
import torch
from accelerate import Accelerator
a = Accelerator(cpu=True, gradient_accumulation_steps=2); torch.manual_seed(0)
m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1); data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(32.).reshape(8, 4)), batch_size=2)
m, o, data = a.prepare(m, o, data)
for (b,) in data:
    with a.accumulate(m): l = m(b / 32).pow(2).mean(); a.backward(l); o.step(); o.zero_grad()
    print(l.item(), a.sync_gradients, a.num_processes)
a.end_training()

# %% uses_lightning
# ranks 2
import torch, lightning as L, logging, warnings
warnings.simplefilter("ignore"); logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class M(L.LightningModule):
    def __init__(self): super().__init__(); self.l = torch.nn.Linear(4, 1)
    def training_step(self, b, i): return self.l(b[0]).pow(2).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=.1)
L.seed_everything(1, verbose=False)
t = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
m = M(); t.fit(m, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2)); print(t.global_step, m.l.weight.sum().item())

# %% uses_trainer
# ranks 2
import torch, transformers, logging
transformers.logging.set_verbosity_error(); transformers.set_seed(0)
from transformers import Trainer, TrainingArguments, GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
args = TrainingArguments("out", per_device_train_batch_size=2, max_steps=4, report_to=[], save_strategy="no", logging_steps=2, use_cpu=True, disable_tqdm=True, seed=0)
r = Trainer(model=model, args=args, train_dataset=data).train(); print(r.global_step, r.training_loss)

# %% freed_in_a_function
# ranks 2
import torch, weakref
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
class Kept:
    pass
def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    optimizer, kept, batches = torch.optim.SGD(model.parameters(), 0.1), Kept(), []
    old = weakref.ref(kept)
    for step in range(12):
        batch = torch.ones(8, 4)
        batches.append(weakref.ref(batch))
        loss = model(batch).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step == 5: kept = None
    print(old() is None, [each() is None for each in batches])
    model = optimizer = loss = None  # DDP that outlives its group keeps the GIL while it waits for gloo, which wants it
    dist.destroy_process_group()
def logged(rate):
    config = locals()
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), rate)
    for step in range(3):
        loss = model(torch.ones(1, 4)).sum(); optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(sorted(config))
logged(0.1); main()

# %% alarms_that_raise
import random, signal, torch
from torch.utils.data import DataLoader, TensorDataset
random.seed(0); raised = caught = steps = 0
def ring(number, frame):
    global raised
    raised += 1
    raise TimeoutError("this batch takes too long")
signal.signal(signal.SIGALRM, ring)
model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.ones(4000, 4)), batch_size=8)
def train(epochs):
    global steps
    for _ in range(epochs):
        for batch, in loader:
            loss = model(batch).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step(); steps += 1
train(1)  # imports of torch that the first step does
while raised < 300:
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003))
    try: train(1000)
    except TimeoutError: caught += 1; torch.set_grad_enabled(True)  # torch's own no_grad may have been interrupted
print(raised, caught, steps > 500)

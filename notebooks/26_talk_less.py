# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 26 · Talk less: training over a slow link
#
# **You will be able to** compress DDP's gradients or average replicas only now and then, and say how many bytes each
# way sends, what it costs in loss, and up to what bandwidth it pays off. **20 minutes. You need** labs 03 and 06.
#
# DDP sends all gradients in every step, hidden behind backward. When the link is slower than backward, every rank
# waits. There are two ways out, and neither trains exactly what DDP trains: send each gradient in fewer bytes
# (**compression**), or send less often (**local SGD**, **DiLoCo**): the replicas train alone for a round of steps and
# are then averaged. (The picture has rounds of eight steps.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 122  # bytes are counted in all but the first two
seeds: int = 3  # each way trains once from each of them
plans: bool = True  # plan a model of 405 million parameters on other devices: a minute

# %%
import labkit
from labkit_labs import Lesson, defined, draw, sized
from labkit_labs.labs.traffic import noting_bytes, sent_in_a_step
from labkit_labs.labs.slow_links import at_the_end, between_hosts, break_even
from labkit_labs.labs.slow_links import difference_curves, differences, timeline, validation_losses

lab = Lesson("26_talk_less", ranks=nproc_per_node)
ways = {
    "DDP": ("ddp", {}),
    "int8": ("ddp", {"compress": "int8"}),
    "PowerSGD": ("ddp", {"compress": "powersgd", "powersgd_rank": 1}),
    "local SGD": ("diloco", {"outer_lr": 1, "outer_momentum": 0}),
    "DiLoCo": ("diloco", {}),
}
timeline(20, moving=True)

# %% [markdown]
# ## Your predictions
#
# Gradients are fp32. With **int8** every rank sends its own in 8 bits to all others. **PowerSGD** of rank 1 sends two
# vectors for each matrix, whose product approximates it. Both add what they left out to the next step's gradient.
# **Local SGD** averages the replicas after each round of 10 steps. **DiLoCo** takes the averaged change of a round as a
# gradient, and makes a step of SGD with momentum. All use the same learning rate. The first three questions are about a
# small model on two ranks, the last one about 405 million parameters on two hosts of eight A100s.

# %%
by_way = {name: float(number) for number, name in enumerate(ways)}
share = lab.ask("int8: bytes sent, over DDP's", default=25, unit="%")
rank_1 = lab.ask("PowerSGD: bytes sent, over DDP's", default=1, unit="%")
worst = lab.ask("the way whose loss ends furthest above DDP's", default=by_way["DiLoCo"], options=by_way)
links = {"1 Gbit/s": 1.0, "10 Gbit/s": 10.0, "100 Gbit/s": 100.0, "400 Gbit/s": 400.0}
pays = lab.ask("DiLoCo: the fastest link between hosts over which it saves 5% of a step", default=10, options=links)

# %% [markdown]
# ## Run all of them
#
# A small decoder over bytes trains on two ranks, with the same samples in the same order for every way. An all-reduce
# of S bytes costs 2 (N − 1) S over all ranks; a gather that leaves S on every rank costs (N − 1) S. For a matrix of n ×
# m numbers PowerSGD sends n + m, if that is less than half; it sends everything else whole.

# %%
scripts = {name: noting_bytes(sized(labkit.Script.load(name), width=32, layers=2)) for name in ("ddp", "diloco")}
runs, options = {}, {"steps": steps, "global_batch_size": 16, "validate_every": 30}
for way, (name, own) in ways.items():
    runs[way] = {s: lab.launch(scripts[name], name=way, seed=s, shown=False, **own, **options) for s in range(seeds)}

# %%
above = differences({way: {s: validation_losses(run) for s, run in each.items()} for way, each in runs.items()}, "DDP")
end = at_the_end(above)
print("test loss above DDP's at the end:", {way: round(loss, 3) for way, loss in end.items()})
lab.verify(worst, by_way["PowerSGD"], by_way[max(end, key=end.get)])
difference_curves(above, f"test loss above DDP's from the same seed: median and range of {seeds} seeds")

# %% [markdown]
# The bytes by the formulas, and what the kernel counted:

# %%
peers = nproc_per_node - 1
shapes = [p.shape for p in defined(scripts["ddp"], "model").Model().parameters()]
whole = [shape.numel() for shape in shapes]  # of each tensor: its numbers, and those of PowerSGD's two vectors
vectors = [shape[0] + shape.numel() // shape[0] for shape in shapes]
of_ddp = 2 * peers * 4 * sum(whole)
powersgd = [v if 2 * v < n else n for n, v in zip(whole, vectors, strict=True)]
of_int8 = nproc_per_node * peers * (sum(whole) + 4 * len(whole))  # a byte for each number, a scale for each tensor
formula = {"DDP": of_ddp, "int8": of_int8, "PowerSGD": 2 * peers * 4 * sum(powersgd)}
formula |= {"local SGD": of_ddp / 10, "DiLoCo": of_ddp / 10}
sent = {way: sent_in_a_step(each[0], nproc_per_node, steps, after=2) for way, each in runs.items() if lab.counts_bytes}
draw.bars(sent, formula, unit="B", title="sent by all ranks in a step")

# %%
for way, size in sent.items():  # of small tensors, the headers are more
    near = 0.02 if way in ("DDP", "int8") else 0.2
    lab.verify(f"{way}: sent by all ranks in a step", formula[way], size, "B", within=near)
for name, way in ((share, "int8"), (rank_1, "PowerSGD")) if sent else ():
    lab.verify(name, formula[way] / formula["DDP"], sent[way] / sent["DDP"], "%", within=0.2)

# %% [markdown]
# ## Why
#
# The bytes above the formula are headers: PowerSGD, local SGD and DiLoCo send many small tensors.
#
# **Compression** changes each step's gradient, and what one step leaves out is added in the next. int8 leaves out
# little. Two vectors per matrix are not enough for a small model early in training; a higher rank is. **Local SGD and
# DiLoCo** send uncompressed numbers, but replicas drift apart within a round, and the mean of their weights is not what
# one model trained on all of their samples would be. DiLoCo is *below* DDP at first: its outer step, with momentum,
# goes further than the round did, as a higher learning rate would. The curves say what this small model lost in its
# first 122 steps, not what yours will: before you trust any of these ways, compare them after the same number of
# samples, each with a learning rate of its own and with several seeds.
#
# Compressed gradients still hide behind backward. An average of weights cannot: it needs the last step's result. The
# slider sets how many seconds all gradients take, if forward takes one and backward two.

# %%
lab.explore(timeline, send=[1, 5, 20, 40])

# %% [markdown]
# ## Where does it pay?
#
# DDP's W bytes take W / B seconds at a bandwidth of B, of which backward hides b; DiLoCo's take a tenth of W / B, and
# nothing hides them. DiLoCo saves the difference, 0.9 W / B − b, which is 5% of a step that computes for C seconds if B
# = 0.9 W / (b + C / 20). Networks reach some 80% of their line rate. The planner works out the details for 405 million
# parameters on two hosts of eight A100s. The slider sets the Gbit/s between hosts.

# %%
gpt = {"vocabulary": 50257, "context": 512, "width": 1024, "heads": 16, "layers": 24}
larger = {name: sized(labkit.Script.load(name), **gpt) for name in ("ddp", "diloco")}
planned = {way: (larger[strategy], own) for way, (strategy, own) in ways.items()}
steps_at = between_hosts(planned, "A100 40", nodes=2, precision="bf16", global_batch_size=128)


def at(Gbit_per_s):
    parts = {way: step.parts for way, step in steps_at(Gbit_per_s).items()}
    return draw.bars(predicted=parts, unit="s", title="a step, planned")


lab.explore(at, Gbit_per_s=[1, 10, 25, 50, 100, 200, 400])

# %%
parts = steps_at(100)["DDP"].parts
W, b, C = 2 * 15 / 16 * 4 * 405.8e6, 2 / 3 * parts["compute"], sum(parts.values()) - parts["communication"]
formula = 0.9 * W / (b + C / 20) / 0.8 * 8 / 1e9
planned = break_even(lambda Gbit: steps_at(Gbit)["DDP"].seconds / steps_at(Gbit)["DiLoCo"].seconds)
print(f"DiLoCo saves 5% of a step up to {formula:.0f} Gbit/s by the formula, {planned:.0f} by the plans")
lab.verify(pays, formula, planned, within=0.1, planned=True)
lab.score()

# %% [markdown]
# On 16 ranks int8 sends twice as much as DDP: each rank sends its own gradients to all others, instead of one sum
# around a ring. PowerSGD's factors are so small that the network hardly matters, but the planner does not count the
# time that it takes to compute them, and you have seen what they cost in loss.
#
# ## On 2 × T4 and 8 × A100
#
# Now put the same model on one host. Two T4s share PCIe; eight A100s have NVLink.

# %%
if plans:
    display(lab.plans({"DDP": larger["ddp"], "DiLoCo": larger["diloco"]}, global_batch_size=8))
else:
    print("(the plan is skipped on this page: set plans = True)")

# %% [markdown]
# Look at *waiting*: where DDP does not wait, sending less gains nothing and costs loss.
#
# **In your own code** torch's hooks change what DDP sends; register them after `DistributedDataParallel(…)` and before
# the first step. Try these in order, and stop when the timeline (lab 17) shows no more waiting:
#
# ```python
# # 1. If you accumulate gradients, send them once per step: model.no_sync() (lab 03).
# # 2. 16 bits: half the bytes, hardly a difference (on a T4 fp16_compress_hook).
# from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
# model.register_comm_hook(None, default_hooks.bf16_compress_hook)
# # 3. PowerSGD, by default after 1,000 steps of plain DDP. Not with fp16 and its scaler:
# # an overflow would stay in the state.
# state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4)
# model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # instead of 2, not with it
# ```
#
# Local SGD and DiLoCo are for links between data centers rather than between machines. torch has
# `PostLocalSGDOptimizer` and `PeriodicModelAverager`; `print(labkit.Script.load("diloco"))` shows a training script.
#
# ## Try this
#
# 1. `nproc_per_node = 4`: does int8 still send a quarter of DDP's bytes?
#    <details><summary>Answer</summary>No, half: 561 kB instead of 1,111 kB. A rank sends P / 4 bytes to each other
#    rank; an all-reduce costs it 2 P (N − 1) / N. The ratio is N / 8: with 8 ranks or more, int8 saves
#    nothing.</details>
# 2. With `steps = 152` and `"powersgd_rank": 4`: how much does the loss improve, and how many more bytes are sent?
#    <details><summary>Answer</summary>After 150 steps the loss is 0.078 above DDP's instead of 0.200 (medians of three
#    seeds), and 17% of the bytes are sent instead of 6%.</details>
# 3. Use `steps = 152` and rounds of 50 steps, `"DiLoCo": ("diloco", {"sync_every": 50})`, which send a fifth of the
#    bytes. What happens to the loss?
#    <details><summary>Answer</summary>After 150 steps it is 0.020 above DDP's (0.003 to 0.025), with rounds of 10 steps
#    0.042 (0.016 to 0.047): not worse here, after three rounds.</details>
#
# ## Sources
#
# Douillard et al., *DiLoCo* (arXiv 2311.08105). Stich, *Local SGD Converges Fast and Communicates Little* (arXiv
# 1805.09767). Vogels et al., *PowerSGD* (arXiv 1905.13727). Seide et al., *1-Bit Stochastic Gradient Descent*
# (Interspeech 2014): adding what was left out to the next gradient.

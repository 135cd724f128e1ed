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
# # 27 · Experts: tokens travel, parameters stay
#
# **You will be able to** say what a mixture of experts sends when its experts are on different ranks, when that is less
# than gathering them would send, and what a busy expert costs. **20 minutes. You need** labs 02 and 05.
#
# In a **mixture of experts** a block has E MLPs instead of one, its experts, and a **router** that chooses k of them
# for each token. Parameters grow with E, but a token's computation only with k. FSDP would gather all E experts on
# every rank. **Expert parallelism** leaves them where they are and sends the tokens: one `all_to_all` to the ranks of
# their experts and another one back, and in backward the same for gradients.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; they must divide the 8 experts
steps: int = 40  # of each training
plans: bool = True  # plan for GPUs: some seconds more

# %%
import labkit
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.experts import EXPERTS, SECONDS, by_rank, routed, shares_by_step, sleeping_experts
from labkit_labs.labs.traffic import noting_bytes, sent_in_a_step

lab, N = Lesson("27_experts", ranks=nproc_per_node), nproc_per_node
routed(N, moving=True)

# %% [markdown]
# ## Your predictions
#
# First train a small decoder, 64 wide, on two ranks. A block has 8 experts, of which a token uses two; the experts have
# 262,144 numbers together. A step has 512 tokens on each rank, each a vector of 64 numbers. FSDP gathers the experts
# twice and reduces their gradients. If tokens travel, each goes to its experts and back, in forward and in backward.
# Then make the router uneven on purpose: half of the tokens choose expert 0, the others choose evenly.

# %%
share = lab.ask("expert parallel: bytes sent, over FSDP's", default=100, unit="%")
busiest = lab.ask("after 40 steps: share of the tokens that chose the busiest of 8 experts", default=12.5, unit="%")
more = lab.ask("half of the tokens choose one expert: bytes sent, how many times those of an even choice", default=1.5)
slower = lab.ask("half of the tokens choose one expert: step time, how many times that of an even choice", default=4)

# %% [markdown]
# ## Run both

# %%
names = {"FSDP": "fsdp", "expert parallel": "expert_parallel"}
w, k, blocks, samples = 64, 2, 2, 8
task = {way: labkit.Script.load(name, "precision", task="mixture") for way, name in names.items()}
scripts = {way: noting_bytes(sized(script, width=w, layers=blocks)) for way, script in task.items()}
options = {"global_batch_size": samples, "precision": "fp64", "top_k": k, "experts": EXPERTS, "steps": steps}
runs = {way: lab.launch(script, shown=False, **options) for way, script in scripts.items()}

# %% [markdown]
# In a model that is w wide an expert has 8 w² numbers. All ranks together send, in a step:
#
# - FSDP: N − 1 times a block for each of two gathers, and 2 (N − 1) times for its gradients, because gloo implements
#   reduce-scatter as an all-reduce: 4 (N − 1) in all. What is outside blocks is gathered only once, and sent 3 (N − 1)
#   times.
# - Expert parallelism: for each of its T tokens a rank sends k copies of w numbers, four times for each block, but
#   keeps those for its own experts: 4 k T w (N − 1) over all ranks.

# %%
experts, rest, ends = 8 * w * w * EXPERTS * blocks, (4 * w + 8 + EXPERTS) * w * blocks, 642 * w  # numbers
tokens = 4 * k * (samples // N * 128) * w * blocks
numbers = {"FSDP": 4 * (experts + rest) + 3 * ends, "expert parallel": tokens + 4 * rest + 3 * ends}
formula = {way: 8 * (N - 1) * number for way, number in numbers.items()}  # float64
sent = {way: sent_in_a_step(run, N, steps) for way, run in runs.items() if lab.counts_bytes}
less = formula["expert parallel"] / formula["FSDP"]
display(draw.bars(sent, formula, unit="B", title=f"sent by all ranks in a step: {less:.0%} by the formula"))
shares = shares_by_step(runs["expert parallel"])
off = (runs["expert parallel"].losses() / runs["FSDP"].losses() - 1).abs().max()
print("the largest relative difference of a loss between the two:", off)
lines = {"busiest expert": max, "an even share": lambda of: sum(of) / len(of), "least busy": min}
draw.curves({name: [(i, of(each)) for i, each in shares.items()] for name, of in lines.items()}, "share of the tokens")

# %% [markdown]
# Both train the same model; only the bytes differ. Nothing balances the router, and it does not balance itself: an
# expert that gets more tokens learns faster and is chosen more often (Shazeer et al.).
#
# ## Parameters or tokens?
#
# With NCCL, a rank sends this for the experts of a block, if h is their hidden width (an expert has 2 h w numbers):
#
# - FSDP, with two gathers and a reduce-scatter: 3 · 2 E h w (N − 1) / N numbers,
# - tokens that travel: 4 k T w (N − 1) / N.
#
# So tokens are cheaper up to T = 1.5 E h / k on each rank, whatever N and w are: up to 24,576 if 8 experts have h =
# 4,096 and a token uses two of them.


# %%
def a_block(tokens, top_k, ranks):
    numbers = {"FSDP gathers": 3 * EXPERTS * 2 * 4096 * 1024, "tokens travel": 4 * top_k * tokens * 1024}
    sent = {way: 2 * number * (ranks - 1) / ranks for way, number in numbers.items()}
    return draw.bars(predicted=sent, unit="B", title="a rank sends for a block of width 1,024 in bf16")


lab.explore(a_block, tokens=[1024, 8192, 24576, 65536], top_k=[1, 2, 4], ranks=[2, 8, 64])

# %% [markdown]
# ## A busy expert
#
# Now each token uses one expert and sleeps a millisecond in it, in forward and in backward. All ranks wait for the one
# whose experts have the most tokens. With a share s for expert 0 and an even choice for the rest, its rank has s + (1 −
# s) / N of all tokens instead of 1 / N.

# %%
cases = {"an even choice": 0.0, "half choose expert 0": 0.5}
options = {"steps": 4, "global_batch_size": 4, "top_k": 1, "experts": EXPERTS}
busy = {case: lab.launch(noting_bytes(sleeping_experts(s)), shown=False, **options) for case, s in cases.items()}

# %%
seconds = {case: 4 * SECONDS * 4 * 128 * (s + (1 - s) / N) for case, s in cases.items()}  # 2 blocks, there and back
times = {case: run.metrics()["step_seconds"].dropna().median() for case, run in busy.items()}
even, uneven = busy.values()
on_its_rank = by_rank(shares_by_step(uneven)[4], N)[0]
ratio = sent_in_a_step(uneven, N, 4) / sent_in_a_step(even, N, 4) if lab.counts_bytes else float("nan")
print(f"half choose expert 0: {on_its_rank:.1%} of the tokens are on its rank, {ratio:.3f} times the bytes are sent")
draw.bars(times, seconds, unit="s", title="a step; predicted: what the experts take")

# %%
lab.verify("largest difference of a loss to FSDP's, in float64", 1e-9, off, how="at most")
lab.verify(busiest, 0.15, max(shares[steps]), "%", how="at least")
lab.verify(slower, N * (0.5 + 0.5 / N), times["half choose expert 0"] / times["an even choice"], within=0.1, timed=True)
if lab.counts_bytes:
    both = {f"{way}: sent by all ranks in a step": (formula[way], size) for way, size in sent.items()}
    lab.verify_each(both, "B", within=0.05)
    lab.verify(share, less, sent["expert parallel"] / sent["FSDP"], "%", within=0.05)
    lab.verify(more, 1, ratio, "times", within=0.02)
lab.score()

# %% [markdown]
# The bytes are the same whatever the router chooses: if more tokens stay on one rank, just as many fewer stay on
# another. The time is not the same: the others wait. The remedies change what is trained. A **capacity** limits the
# tokens of an expert and drops the rest, which then have only the residual connection. A **balancing loss**, or a bias
# for each expert that a controller adjusts, makes the router choose more evenly. Move the sliders; outlined tokens are
# dropped, none with a capacity of 0.

# %%
lab.explore(routed, capacity=[0, 2, 1.25, 1], ranks=[2, 4, 8], share=[0, 0.5, 1])

# %% [markdown]
# ## Why
#
# This is what each rank does in a block, with its tokens sorted by expert. `exchange` is `all_to_all_single` on the
# tokens; in backward it sends their gradients in the opposite direction:
#
# ```python
# dist.all_to_all_single(arriving, leaving)  # how many tokens each rank sends to each expert
# tokens = exchange(tokens, to_each_rank, from_each_rank)
# outputs = experts(tokens)  # this rank's, on tokens of all ranks
# outputs = exchange(outputs, from_each_rank, to_each_rank)
# ```
#
# The tensors have no fixed size, so the counts have to be known on the CPU before the tokens are sent. And nothing
# hides the sending: experts need their tokens, and the next layer needs the results, whereas FSDP's gathers run while
# the previous block computes. So the link decides: keep a group of experts within a host (`expert_ranks=8`), and
# replicate the group across hosts. `print(task["expert parallel"].cells["experts"].text)` shows all of it.
#
# ## On 2 × T4 and 8 × A100
#
# The model has 4 blocks of width 512 with 32 experts each, and 273 million parameters, of which each token uses 21
# million.

# %%
larger = {way: sized(script, width=512, layers=4, heads=8, context=512) for way, script in task.items()}
if plans:
    display(lab.plans(larger, experts=32, top_k=k, precision="fp16", global_batch_size=16))

# %% [markdown]
# Gathering 32 experts over PCIe between the T4s takes longer than computation can hide; if tokens travel, a rank waits
# less. NVLink is so fast that FSDP's gathers are hidden, and expert parallelism gains no time there. (It even loses
# some: AdamW updates parameters of different meshes one after another.) What is left to gain is memory: no rank gathers
# all experts of a block any more.
#
# **Which to choose?** Take FSDP as long as its gathers are hidden and a whole block fits beside the shards; then no
# rank waits for a busy expert. Put experts on ranks of their own if they are many or large, tokens are few, or links
# are slow. With either, balance the router.
#
# ## Try this
#
# 1. Use one expert per token: `k = 1`. What share of FSDP's bytes is sent now?
#    <details><summary>Answer</summary>22% instead of 33%. Half as many rows travel; the rest of the model is gathered
#    as before.</details>
# 2. Launch `scripts["expert parallel"]` with `expert_ranks=1`. What does it send?
#    <details><summary>Answer</summary>What FSDP sends, to within 0.03%: every rank has all experts, as replicas, and
#    FSDP shards those.</details>
# 3. Launch the last two with `capacity=1.0`. How long does a step take?
#    <details><summary>Answer</summary>With an even choice it takes as long as before. If half choose expert 0, it takes
#    0.65 of that: 44% of the tokens are dropped, which leaves rank 0 with 5/16 of them instead of 1/2, or 0.63 by the
#    formula.</details>
# 4. Balance the router as DeepSeek-V3 does: add a bias for each expert to its score, only for choosing; after each step
#    lower it by 0.01 if the expert had more than an even share, otherwise raise it.
#    <details><summary>Answer</summary>In the cell <code>model</code>, after <code>import torch.distributed as
#    dist</code> and <code>self.register_buffer("bias", torch.zeros(experts))</code>: <code>scores =
#    self.router(tokens).softmax(-1)</code>, <code>chosen = (scores + self.bias).topk(self.top_k).indices</code>,
#    <code>scores = scores.gather(-1, chosen)</code>, and where the sizes are known, <code>if self.training: sizes =
#    torch.tensor(self.sizes, device=x.device); dist.all_reduce(sizes); self.bias -= 0.01 * (sizes - sizes.sum() /
#    len(places)).sign()</code>. Without the sum over all ranks their biases would drift apart. In the last 20 of 40
#    steps the busiest expert has 18% of the tokens instead of 25%, and in the last 20 of 400 steps 15% instead of 23%.
#    The test loss stays the same: 2.76 instead of 2.77, and 2.23.</details>
#
# ## Sources
#
# Shazeer et al., *Outrageously Large Neural Networks* (arXiv 1701.06538), section 4: routers that favor few experts.
# Lepikhin et al., *GShard* (arXiv 2006.16668): all-to-all, capacity. Fedus et al., *Switch Transformers* (arXiv
# 2101.03961): one expert per token, the balancing loss. DeepSeek-AI, *DeepSeek-V3* (arXiv 2412.19437), section 2.1.2: a
# bias instead of that loss.

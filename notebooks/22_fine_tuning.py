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
# # 22 · Fine-tune a language model on two T4s
#
# **You will be able to** choose between training all weights and a LoRA adapter, and between DDP and FSDP, before you
# rent a GPU; train all four ways; and leave with an adapter that plain `peft` loads. **20 minutes. You need** labs 03,
# 04 and 05.
#
# **LoRA** freezes the model and puts two thin matrices beside each layer: if the layer has *out* × *in* numbers, one
# has *out* × *r* and the other *r* × *in*. Only these are trained, so only these have gradients and AdamW's moments.
# *r* is called the adapter's *rank*, which has nothing to do with the ranks that train.
#
# On Kaggle: attach a model, for example *Qwen 3 / transformers / 0.6b*, and set `model` below to its folder in
# `/kaggle/input`. Nothing else changes.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 30  # optimizer steps of each fine-tuning
model: str = ""  # a folder with a model and its tokenizer; "" trains a small one first
large: bool = True  # plan a model of 1.7 billion parameters, too: two minutes

# %%
import tempfile
from pathlib import Path

import labkit
from labkit import Script
from labkit_labs import Lesson, draw
from labkit_labs.labs.small_data import adapter, numbers_saved, qwen3_1_7b, small_model, sums

lab, folder = Lesson("22_fine_tuning", ranks=nproc_per_node), Path(tempfile.mkdtemp(prefix="fine-tuning-"))
adapter(128, 256, rank=8)

# %% [markdown]
# ## Your predictions
#
# The picture shows, to scale, the largest layer in the small model below; other layers are 128 x 128 or 64 x 128. The
# model has 0.6 million weights, nearly all of them in such layers. With LoRA its frozen weights are kept in 16 bits.

# %%
share = lab.ask("LoRA: numbers in the adapter, as a share of the model's weights", default=1, unit="%")
saved = lab.ask("all weights, DDP: numbers in a checkpoint, how many times the weights", default=1, unit="times")
holds = lab.ask("LoRA, DDP: what a rank holds, as a share of what it holds without LoRA", default=10, unit="%")

# %% [markdown]
# ## Data and model
#
# The data have one line of JSON for each question. With the columns `prompt` and `completion` the loss counts only the
# completion. Without a model from a hub, a small one first learns to write sums. It is written to `export_dir`, a
# folder that any program can load with `from_pretrained`; `model` and `pretrained=True` read it again.

# %%
lines, common = sums(folder / "sums"), {"data_dir": folder / "sums", "context": 32}
print(*(line["prompt"] + line["completion"] for line in lines[:3]), sep="\n")
if not model:
    start, model = small_model(folder / "start", lines), folder / "base"
    first = Script.load("ddp", "export", task="causal_lm")
    lab.launch(first, **common, model=start, steps=60, global_batch_size=32, lr=3e-3, export_dir=model)

# %% [markdown]
# ## Four ways
#
# The strategy and the extra `lora` replace a few cells of the script.

# %%
import torch
from transformers import AutoModelForCausalLM

RANK = 8
WAYS = {
    "all weights, DDP": ("ddp", []),
    "all weights, FSDP": ("fsdp", []),
    "LoRA, DDP": ("ddp", ["lora"]),
    "LoRA, FSDP": ("fsdp", ["lora"]),
}


def script_of(name):
    strategy, extras = WAYS[name]
    return Script.load(strategy, "precision", "checkpoints", "export", *extras, task="causal_lm")


# %%
runs = {}
for name in WAYS:
    out, lora = folder / name.replace(", ", "-").replace(" ", "-"), name.startswith("LoRA")
    runs[name] = lab.launch(
        script_of(name), **common, model=model, pretrained=True, steps=steps, global_batch_size=16, shown=False,
        precision="bf16" if lab.on_cpu else "fp16", lr=1e-3 if lora else 3e-4, checkpoint_dir=out,
        full_checkpoints=True, export_dir=f"{out}-out", **({"lora_rank": RANK} if lora else {}),
    )  # fmt: skip

# %%
base = AutoModelForCausalLM.from_pretrained(model)
layers = [layer for layer in base.model.layers.modules() if isinstance(layer, torch.nn.Linear)]
W = sum(parameter.numel() for parameter in base.parameters())
A = sum(RANK * (layer.in_features + layer.out_features) for layer in layers)
held = {"all weights": 16 * W, "LoRA": 2 * W + 16 * A}  # bytes, under DDP
held = {way: held[way.split(",")[0]] / (lab.ranks if way.endswith("FSDP") else 1) for way in WAYS}
seen = dict(zip(runs, labkit.compare([*runs.values()]).table.held_bytes, strict=True))
draw.bars(seen, held, unit="B", title="a rank holds, of weights, gradients and AdamW's state")

# %%
trained = runs["LoRA, DDP"].metrics().trained_parameters.dropna().iloc[0]
saves = {way: numbers_saved(folder / f"{way}-DDP" / f"step-{steps}") for way in ("all-weights", "LoRA")}
print(f"{trained:,.0f} of {W:,} numbers are trained; numbers in a checkpoint: {saves}")
lab.verify(share, A / W, trained / W, "%", within=0.05)
ratio = held["LoRA, DDP"] / held["all weights, DDP"]
lab.verify(holds, ratio, seen["LoRA, DDP"] / seen["all weights, DDP"], "%", within=0.05)
lab.verify(saved, 3, saves["all-weights"] / W, "times")
lab.verify("LoRA, DDP: numbers in a checkpoint, how many times the adapter's", 3, saves["LoRA"] / A, "times")
lab.score()

# %% [markdown]
# ## Why
#
# Without LoRA a rank of DDP holds 16 bytes per parameter (lab 04). With LoRA it holds 2 for each frozen weight and 16
# for each number in the adapter. FSDP divides both by the number of ranks. Activations are not in the picture, and LoRA
# does not reduce them: backward still has to pass through all layers.
#
# A checkpoint holds what training needs to go on: the trained weights and AdamW's two moments. With LoRA the trained
# weights are the adapter; the frozen ones are on the hub. In a large model the adapter is a smaller share (here of a
# layer of Qwen3 1.7B), because its size grows with the width and the layer's with the square of the width:

# %%
lab.explore(adapter, 2048, 6144, rank=[8, 32, 128])

# %% [markdown]
# ## Take it with you
#
# The adapter needs neither labkit nor the script. Merged into the model
# (`adapted.merge_and_unload().save_pretrained(…)`), it no longer needs `peft` either. (In this short time the small
# model has learned the form of an answer, not how to add.)

# %%
from peft import PeftModel
from transformers import AutoTokenizer

out = folder / "LoRA-FSDP-out"
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out).eval()
tokenizer = AutoTokenizer.from_pretrained(out)
for prompt in ("20 and 22 make ", "1 and 2 make "):
    ids = tokenizer(prompt, return_tensors="pt")
    print(tokenizer.decode(adapted.generate(**ids, max_new_tokens=4, do_sample=False)[0], skip_special_tokens=True))

# %% [markdown]
# **In your own loop**, before DDP wraps the model:
#
# ```python
# base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
# config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
# model = get_peft_model(base, config)  # the adapter's numbers are fp32
# model = DistributedDataParallel(model.cuda())
# optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
# ...
# model.module.save_pretrained("adapter")  # on rank 0; the adapter alone
# ```
#
# With fp16 use autocast and a scaler (lab 11). A Hugging Face Trainer takes the model that `get_peft_model` returns,
# and torchrun starts it.
#
# ## On 2 × T4 and 8 × A100
#
# A plan needs the model's configuration, not its weights. This one has 1.7 billion parameters and takes one text of 512
# tokens at a time. Training all weights takes 16 bytes per parameter, 26 GiB, and even half of that leaves no room for
# activations on a T4. LoRA keeps the frozen ones in 16 bits, which takes 3.2 GiB.

# %%
if large:
    options = {"model": qwen3_1_7b(folder / "1.7b"), "precision": "fp16", "context": 512, "global_batch_size": 8}
    display(lab.plans({name: script_of(name) for name in WAYS}, **options))
else:
    print("(the plan is skipped on this page: set large = True)")

# %% [markdown]
# **Which to choose?** Take LoRA under DDP if the model in 16 bits and its activations fit on each GPU, and LoRA under
# FSDP for a larger model. Train all weights if there is much to learn, such as a new language, and use FSDP once DDP's
# 16 bytes per parameter no longer fit. If even LoRA does not fit, shorten the texts, recompute activations
# (`activation_checkpointing=True`), or keep the frozen weights in 4 bits (QLoRA: the extra `four_bit`, under DDP).
#
# ## Try this
#
# 1. Pass `lora_targets=["q_proj", "v_proj"]`: how many numbers are trained? Predict before you launch.
#    <details><summary>Answer</summary>14,336. In each of four blocks <code>q_proj</code> (128 to 128) has 8 × 256 and
#    <code>v_proj</code> (128 to 64) 8 × 192.</details>
# 2. Give `Script.load` the strategy `tensor_parallel` with `"lora"`.
#    <details><summary>Answer</summary>The ranks stop before the first step: "tensor parallelism cannot split a model
#    with LoRA: use ddp, zero2 or fsdp".</details>
# 3. Go on from a LoRA checkpoint with another `model`. What tells labkit that it is not the same one?
#    <details><summary>Answer</summary>The ranks stop: "… step-3 adapts a base model with other weights: pass its
#    --model, or another --checkpoint-dir". An adapter fits one base only.</details>
#
# ## Sources
#
# Hu et al., *LoRA* (arXiv 2106.09685). huggingface.co/docs/peft: `LoraConfig`. docs/how_to/models.md.

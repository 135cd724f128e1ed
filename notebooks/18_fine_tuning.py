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
# # 18 · Fine-tune a language model on two T4s
#
# **You will be able to** choose between training all weights and a LoRA adapter, and between DDP and FSDP, before a GPU
# is rented; train all four; and leave with an adapter that plain `peft` loads. **20 minutes. You need** labs 03 and 07.
#
# **LoRA** freezes the model and puts two thin matrices beside each layer. Only these have gradients and AdamW's
# moments. Their inner dimension is called the adapter's *rank*, which has nothing to do with the ranks that train.
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

from labkit import Script
from labkit.lessons import Lesson, draw
from labkit.lessons.labs.fine_tuning import adapter, numbers_exported, numbers_saved, qwen3_1_7b, small_model, sums

lab, folder = Lesson("18_fine_tuning", ranks=nproc_per_node), Path(tempfile.mkdtemp(prefix="fine-tuning-"))
adapter(128, 256, rank=8)

# %% [markdown]
# ## Your predictions
#
# The small model below has 4 blocks of width 128, the adapter rank 8.

# %%
share = lab.ask("LoRA: numbers in the adapter, as a share of the model's weights", default=1, unit="%")
saved = lab.ask("all weights, DDP: numbers in a checkpoint, how many times the weights", default=1, unit="times")
lora_saved = lab.ask("LoRA, DDP: numbers in a checkpoint, how many times the adapter's", default=1, unit="times")

# %% [markdown]
# ## Data and model
#
# One line of JSON for each question. With the columns `prompt` and `completion` the loss counts the completion only.
# Without a model from a hub, a small one learns to write sums first. It goes out through `export_dir`, as a folder that
# any program loads with `from_pretrained`, and comes back in through `model` and `pretrained`.

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
# The scripts differ in one cell or two. By hand: LoRA puts `rank × in` and `out × rank` numbers beside each layer.

# %%
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

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


base = AutoModelForCausalLM.from_pretrained(model)
layers = [layer for layer in base.model.layers.modules() if isinstance(layer, torch.nn.Linear)]
trained = {"all weights": sum(parameter.numel() for parameter in base.parameters())}
trained["LoRA"] = sum(RANK * (layer.in_features + layer.out_features) for layer in layers)
lab.predict(share, trained["LoRA"] / trained["all weights"], "%")
lab.predict_each({saved: 3, lora_saved: 3}, "times")
near = {kind: f"{kind}: largest relative difference of a loss, FSDP to DDP" for kind in trained}
lab.predict_each({near["all weights"]: 1e-2, near["LoRA"]: 1e-2}, how="at most")

# %%
runs = {}
for name in WAYS:
    out, lora = folder / name.replace(", ", "-").replace(" ", "-"), name.startswith("LoRA")
    runs[name] = lab.launch(
        script_of(name), **common, model=model, pretrained=True, steps=steps, global_batch_size=16,
        precision="bf16" if lab.on_cpu else "fp16", lr=1e-3 if lora else 3e-4, checkpoint_dir=out,
        full_checkpoints=True, export_dir=f"{out}-out", **({"lora_rank": RANK} if lora else {}),
    )  # fmt: skip

# %%
numbers = {way: numbers_saved(folder / f"{way}-DDP" / f"step-{steps}") for way in ("all-weights", "LoRA")}
results = {share: numbers_exported(folder / "LoRA-FSDP-out") / trained["all weights"]}
results |= {saved: numbers["all-weights"] / trained["all weights"], lora_saved: numbers["LoRA"] / trained["LoRA"]}
off = {kind: (runs[f"{kind}, FSDP"].losses() / runs[f"{kind}, DDP"].losses() - 1).abs().max() for kind in near}
lab.measure_each(results | {name: off[kind] for kind, name in near.items()})
lab.score()

# %% [markdown]
# ## Why
#
# A checkpoint holds what training needs to go on: the trained weights and AdamW's two moments. With LoRA that is the
# adapter; the frozen weights are on the hub.

# %%
display(draw.curves({name: run.losses().items() for name, run in runs.items()}, "loss"))
lab.explore(adapter, 2048, 6144, rank=[4, 8, 32, 128])

# %% [markdown]
# **Take it with you.** The adapter needs neither labkit nor the script. Merged into the model
# (`adapted.merge_and_unload().save_pretrained(…)`), it no longer needs `peft` either. The small model has
# learned the form of an answer in this short time, not how to add.

# %%
out = folder / "LoRA-FSDP-out"
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out).eval()
tokenizer = AutoTokenizer.from_pretrained(out)
for prompt in ("20 and 22 make ", "1 and 2 make "):
    ids = tokenizer(prompt, return_tensors="pt")
    print(tokenizer.decode(adapted.generate(**ids, max_new_tokens=4, do_sample=False)[0], skip_special_tokens=True))

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# A plan needs the model's configuration, not its weights. 1.7 billion parameters, a text of 512 tokens on each rank.
# AdamW in fp32 takes 16 bytes for each trained parameter: 25 GiB for all weights, and half of that leaves no room for
# activations on a T4. With LoRA the weights stay in 16 bits, 3.2 GiB.

# %%
if large:
    options = {"model": qwen3_1_7b(folder / "1.7b"), "precision": "fp16", "context": 512, "global_batch_size": 8}
    display(lab.plans({name: script_of(name) for name in WAYS}, **options))

# %% [markdown]
# ## Try this
#
# 1. `lora_targets=["q_proj", "v_proj"]`: how many numbers are trained? Predict before you launch.
#    <details><summary>Answer</summary>14,336. In each of four blocks `q_proj` (128 to 128) has 8 × 256 and `v_proj`
#    (128 to 64) 8 × 192.</details>
# 2. Give `Script.load` the strategy `tensor_parallel` with `"lora"`.
#    <details><summary>Answer</summary>The ranks stop before the first step: "tensor parallelism cannot split a model
#    with LoRA: use ddp, zero2 or fsdp".</details>
# 3. Go on from a LoRA checkpoint with another `model`. What tells labkit that it is not the same one?
#    <details><summary>Answer</summary>The ranks stop: "… step-3 adapts a base model with other weights: give its
#    --model, or another --checkpoint-dir". An adapter fits one base only.</details>
#
# ## Sources
#
# Hu et al., *LoRA* (arXiv 2106.09685). huggingface.co/docs/peft: `LoraConfig`. docs/models.md.

# %%
lab.check()

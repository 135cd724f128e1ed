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
# *About three minutes on a laptop's CPU. You should know what DDP (lab 03) and FSDP (lab 07) do.*
#
# You have a model from Hugging Face, a file of questions and answers, and two GPUs of 16 GB. Two questions decide
# everything else: do you train **all** weights or a **LoRA adapter**, and does each GPU hold the whole model (**DDP**)
# or half of it (**FSDP**)? This lab plans all four combinations for a model of 1.7 billion parameters on two T4s, then
# trains them for real on a small one, and leaves with an adapter that plain `peft` loads.
#
# On Kaggle: attach a model, for example *Qwen 3 / transformers / 0.6b*, and set `model` below to its folder in
# `/kaggle/input`. Nothing else changes.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 30  # optimizer steps of each fine-tuning
model: str = ""  # a folder with a model and its tokenizer; "" trains a small one first
large: bool = True  # plan a model of 1.7 billion parameters for two T4s: about a minute

# %%
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_gpus = machine.gpu_count >= nproc_per_node
half = "fp16" if on_gpus else "bf16"  # a T4 computes in fp16; a CPU in bf16
env = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
claims = Claims("18_fine_tuning")
folder = Path(tempfile.mkdtemp(prefix="fine-tuning-"))

# %% [markdown]
# ## Look: what would two T4s hold?
#
# A plan needs the model's configuration, not its weights. Guess first: AdamW in fp32 takes 16 bytes for each trained
# parameter (weight, gradient, two moments). Which of the four fits into 14.6 GiB?

# %%
COMBINATIONS = {
    "all weights, DDP": ("ddp", []),
    "all weights, FSDP": ("fsdp", []),
    "LoRA, DDP": ("ddp", ["lora"]),
    "LoRA, FSDP": ("fsdp", ["lora"]),
}


def script_of(name):
    strategy, extras = COMBINATIONS[name]
    return Script.load(strategy, "precision", "checkpoints", "export", *extras, task="causal_lm")


if large:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    config.save_pretrained(folder / "1.7b")
    for name in COMBINATIONS:
        plan = labkit.plan(
            script_of(name), device="2xT4", model=folder / "1.7b" / "config.json", precision="fp16",
            global_batch_size=2, context=512,
        )  # fmt: skip
        held = f"{plan.bytes / 2**30:.1f} GiB at the peak" if plan.bytes else "not planned"
        print(f"{name}: {held}; {'fits' if plan.fits else 'does not fit'}")

# %% [markdown]
# All weights fit in no way: 1.7 billion × 16 bytes are 25 GiB, and half of that leaves no room for activations. With
# LoRA the weights stay in 16 bits (3.2 GiB) and only the adapter has gradients and moments.
#
# ## The data
#
# One line of JSON for each question. With the columns `prompt` and `completion` the loss counts the completion only.

# %%
random = torch.Generator().manual_seed(0)
pairs = torch.randint(0, 50, (600, 2), generator=random).tolist()
(folder / "sums").mkdir()
lines = [{"prompt": f"{a} and {b} make ", "completion": f"{a + b}."} for a, b in pairs]
(folder / "sums" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
print(*(line["prompt"] + line["completion"] for line in lines[:3]), sep="\n")

# %% [markdown]
# ## The model
#
# Without a model from a hub, a small one learns to write sums first. It goes out through `export_dir`, as a folder that
# any program loads with `from_pretrained`, and comes back in through `model` and `pretrained`.

# %%
common = {"nproc_per_node": nproc_per_node, "data_dir": folder / "sums", "context": 32, "env": env}
if not model:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.BPE())
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    characters.train_from_iterator([json.dumps(lines)], trainers.BpeTrainer(special_tokens=["<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, bos_token="<s>", eos_token="</s>")
    start = folder / "start"
    tokenizer.save_pretrained(start)
    AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
    ).save_pretrained(start)  # fmt: skip
    model = folder / "base"
    labkit.launch(
        Script.load("ddp", "export", task="causal_lm"), **common, model=start, steps=60, global_batch_size=32,
        lr=3e-3, export_dir=model, wait=True,
    )  # fmt: skip

# %% [markdown]
# ## Predict
#
# LoRA puts two matrices beside each layer of `in` inputs and `out` outputs: `rank × in` and `out × rank`. By hand:

# %%
RANK = 8
base = AutoModelForCausalLM.from_pretrained(model)
weights = sum(parameter.numel() for parameter in base.parameters())
layers = [layer for layer in base.model.layers.modules() if isinstance(layer, torch.nn.Linear)]
adapter = sum(RANK * (layer.in_features + layer.out_features) for layer in layers)
claims.predict("LoRA: numbers in the adapter's file", adapter)
for name in COMBINATIONS:
    trained = adapter if "LoRA" in name else weights
    claims.predict(f"{name}: numbers in a checkpoint, of weights and two moments", 3 * trained)
claims.predict("all weights: largest relative difference of a loss, FSDP to DDP", 1e-2, how="at most")
claims.predict("LoRA: largest relative difference of a loss, FSDP to DDP", 1e-2, how="at most")
print(f"{weights:,} weights, {adapter:,} in an adapter: {adapter / weights:.1%}")
display(claims)

# %% [markdown]
# ## Train
#
# The four scripts differ in one cell or two. `prompt` is continued at the end of each run, in the log of rank 0.

# %%
runs = {}
for name in COMBINATIONS:
    kept = folder / name.replace(", ", "-").replace(" ", "-")
    runs[name] = labkit.launch(
        script_of(name), **common, model=model, pretrained=True, steps=steps, global_batch_size=16, precision=half,
        lr=1e-3 if "LoRA" in name else 3e-4, prompt="20 and 22 make ", sample_tokens=4, checkpoint_dir=kept,
        full_checkpoints=True, export_dir=f"{kept}-out", **({"lora_rank": RANK} if "LoRA" in name else {}), wait=True,
    )  # fmt: skip

# %%
labkit.compare(list(runs.values()))

# %% [markdown]
# ## Measure

# %%
for name, run in runs.items():
    kept = folder / name.replace(", ", "-").replace(" ", "-")
    saved = torch.load(kept / f"step-{steps}" / "full.pt", weights_only=True)
    moments = (tensor for state in saved["optimizer"].values() for tensor in state.values() if tensor.dim())
    numbers = sum(tensor.numel() for tensor in [*saved["model"].values(), *moments])
    claims.measure(f"{name}: numbers in a checkpoint, of weights and two moments", numbers, run=run)
out = folder / "LoRA-FSDP-out"
numbers = sum(tensor.numel() for tensor in load_file(out / "adapter_model.safetensors").values())
claims.measure("LoRA: numbers in the adapter's file", numbers, run=runs["LoRA, FSDP"])
for kind in ("all weights", "LoRA"):
    fsdp, ddp = runs[f"{kind}, FSDP"].losses(), runs[f"{kind}, DDP"].losses()
    difference = (fsdp / ddp - 1).abs().max()
    claims.measure(f"{kind}: largest relative difference of a loss, FSDP to DDP", difference, run=runs[f"{kind}, FSDP"])

# %% [markdown]
# ## Leave
#
# The adapter needs neither labkit nor the script. Merged into the model, it needs `peft` no more either:
# `adapted.merge_and_unload().save_pretrained(…)`.

# %%
from peft import PeftModel

adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out).eval()
tokenizer = AutoTokenizer.from_pretrained(out)
for prompt in ("20 and 22 make ", "1 and 2 make "):
    ids = tokenizer(prompt, return_tensors="pt")
    print(tokenizer.decode(adapted.generate(**ids, max_new_tokens=4, do_sample=False)[0], skip_special_tokens=True))

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `lora_targets=["q_proj", "v_proj"]`: how many numbers are trained now? Predict before you launch.
# - Give `Script.load` a tensor-parallel strategy with `"lora"`: the launch says why not.
# - Resume a LoRA checkpoint with another `model`. What tells labkit that it is not the same one?

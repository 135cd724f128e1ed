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
# # 19 · An image model from a hub
#
# **You will be able to** train a model of timm's on a folder of pictures, from random weights and from trained ones, on
# several ranks, and leave with a file that plain `timm` loads. **15 minutes. You need** labs 03 and 07, and `timm`.
#
# Each rank gets other pictures of the batch; gradients are averaged. What a **BatchNorm** layer keeps besides its
# parameters, a running mean and variance, each rank takes from its own pictures, and DDP spreads those of rank 0.
# `SyncBatchNorm` takes them from the pictures of all ranks, by collectives in every such layer: worth it where a GPU
# has few pictures (`labkit.launch(script, sync_batch_norm=True)` under DDP; torch has it for GPUs only).
#
# On Kaggle: set `model` to, for example, `vit_small_patch16_224.augreg_in21k_ft_in1k`, `weights` to its file in
# `/kaggle/input` (or turn the internet on and add `pretrained=True` below), and `data_dir` to a folder with `train` and
# `test` in it. Nothing else changes.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 40  # optimizer steps of each training
model: str = "test_resnet"  # a small one, made for tests
image_size: int = 64  # 0: the model's own
weights: str = ""  # a file; "" trains the model on other pictures first
data_dir: str = ""  # "" draws pictures
large: bool = True  # plan two models of usual size, too: two minutes

# %%
import tempfile
from pathlib import Path

from labkit import Script
from labkit.lessons import Lesson, draw
from labkit.lessons.labs.images import filled, recognized, strip

lab, folder = Lesson("19_images", ranks=nproc_per_node), Path(tempfile.mkdtemp(prefix="images-"))
draw.replicas(nproc_per_node, 8)

# %% [markdown]
# ## Your predictions
#
# The model is a residual network with BatchNorm. The trained weights have seen discs, squares and triangles; they will
# be trained further on rings, frames and crosses.

# %%
more = lab.ask("numbers in the exported file: how many times the parameters", default=1, unit="times")
start = lab.ask("test loss from trained weights: how many times that from random ones", default=0.95, unit="times")
same = lab.ask(
    "largest relative difference of a loss, FSDP to DDP",
    default=0.01,
    options={"not a bit": 0, "the last digits": 1e-16, "visibly": 0.01},
)

# %% [markdown]
# ## Data and weights
#
# Pictures in `train/<class>` and `test/<class>`. Without a file from a hub, the model first learns three other shapes.
# `export_dir` writes what a hub would give you.

# %%
data_dir = data_dir or filled(folder / "pictures", ["ring", "frame", "cross"])
display(strip(data_dir))
classes = len([*Path(data_dir, "train").iterdir()])
common = {"image_size": image_size, "model": model, "global_batch_size": 32}
if not weights:
    other = filled(folder / "other", ["disc", "square", "triangle"], seed=1)
    first = Script.load("ddp", "export", task="images")
    lab.launch(first, **common, data_dir=other, classes=3, steps=5 * steps // 2, lr=1e-3, export_dir=folder / "hub")
    weights = folder / "hub" / "model.safetensors"

# %% [markdown]
# ## Three trainings
#
# The same pictures in the same order, three times. They are normalized as the model's weights expect it.

# %%
import timm
from safetensors.torch import load_file

preset = timm.models.get_pretrained_cfg(model)
size = {"img_size": image_size} if image_size and preset.fixed_input_size else {}
own = timm.create_model(model, num_classes=classes, **size)
parameters = sum(parameter.numel() for parameter in own.parameters())
lab.predict(more, sum(tensor.numel() for tensor in own.state_dict().values()) / parameters, "times")
lab.predict(start, 0.75, "times", how="at most")
lab.predict(same, 1e-2, how="at most")
WAYS = {"random, DDP": "ddp", "trained, DDP": "ddp", "trained, FSDP": "fsdp"}
runs = {}
for name, strategy in WAYS.items():
    script = Script.load(strategy, "validate", "export", task="images")
    known = {"weights": weights} if name.startswith("trained") else {}
    options = common | known | {"data_dir": data_dir, "classes": classes, "validate_every": steps // 4, "lr": 3e-4}
    runs[name] = lab.launch(script, **options, steps=steps, export_dir=folder / name.replace(", ", "-"))

# %%
exported = load_file(folder / "trained-FSDP" / "model.safetensors")
test = {name: run.metrics().dropna(subset=["test_loss"]).drop_duplicates("step") for name, run in runs.items()}
last = {name: table["test_loss"].iloc[-1] for name, table in test.items()}
results = {more: sum(tensor.numel() for tensor in exported.values()) / parameters}
results |= {start: last["trained, DDP"] / last["random, DDP"]}
off = (runs["trained, FSDP"].losses() / runs["trained, DDP"].losses() - 1).abs().max()
lab.measure_each(results | {same: off})
curves = {name: [*zip(table["step"], table["test_loss"], strict=True)] for name, table in test.items()}
display(draw.curves(curves, "loss on the test pictures", log=True))
lab.score()

# %% [markdown]
# The start matters more than the strategy. The file has more numbers than the optimizer ever sees: BatchNorm's mean and
# variance, and a counter for each layer.
#
# ## Leave
#
# Plain `timm`, without labkit. The pictures must be prepared as in the training: size, mean and spread.

# %%
own.load_state_dict(exported)
print(recognized(own, preset, data_dir, image_size or preset.input_size[-1]))

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# A ViT-B has 86 million parameters, a ResNet-50 has 26 million. Which of the two needs more memory for 64 pictures of
# 224 × 224 on each T4? (On eight devices that is 16 each.)

# %%
if large:
    ddp = Script.load("ddp", "precision", "recompute_and_compile", task="images")
    sizes = {"ViT-B": "vit_base_patch16_224", "ResNet-50": "resnet50"}
    ways = {f"{name}{text}": (ddp, {"model": named, "activation_checkpointing": recompute})
            for name, named in sizes.items() for text, recompute in (("", False), (", recomputed", True))}  # fmt: skip
    display(lab.plans(ways, data_dir=data_dir, precision="fp16", global_batch_size=128))

# %% [markdown]
# ## Try this
#
# 1. How many numbers does a ResNet-50 have besides its parameters, and a ViT-B?
#    <details><summary>Answer</summary>53,173, beside 25,557,032 parameters: a mean and a variance for each channel, and
#    a counter for each BatchNorm. A ViT-B has none: LayerNorm looks at one sample at a time.</details>
# 2. Leave out mean and spread when you prepare a test picture (`x / 255` only).
#    <details><summary>Answer</summary>30 of 90 are right instead of 90: as many as by chance. Nothing fails. A file of
#    weights is worth nothing without how its pictures were prepared.</details>
# 3. Prepare them at 32 or 128 pixels instead of 64.
#    <details><summary>Answer</summary>64 and 60 of 90 are right. The network takes any size, but the shapes that it has
#    learned were of another one.</details>
# 4. `lr=3e-3` from random and from trained weights: does the start still matter?
#    <details><summary>Answer</summary>Yes. After 40 steps the test loss was 0.109 from random weights and 0.0075 from
#    trained ones. The larger rate suits both, though.</details>
#
# ## Sources
#
# He et al., *Deep Residual Learning* (arXiv 1512.03385). Ioffe and Szegedy, *Batch Normalization* (arXiv 1502.03167).
# huggingface.co/docs/timm. docs/models.md.

# %%
lab.check()

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
# # 23 · An image model from a hub
#
# **You will be able to** train a timm model on a folder of images, from random and from trained weights, on several
# ranks; say what BatchNorm does there; and leave with a file that plain `timm` loads. **15 minutes. You need** labs 03
# and 05, and `timm`.
#
# BatchNorm is the one common layer for which two ranks do not equal one rank with a larger batch: in training it
# normalizes with the mean and variance of its own rank's images (lab 03). It also keeps running means of both for
# evaluation. These are **buffers**: they have no gradients, so nothing averages them. DDP copies those of rank 0 to all
# ranks before each forward.
#
# On Kaggle: set `model` to, for example, `vit_small_patch16_224.augreg_in21k_ft_in1k`, `weights` to its file in
# `/kaggle/input` (or turn the internet on and add `pretrained=True` below), and `data_dir` to a folder with `train` and
# `test` in it. Nothing else changes.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 40  # optimizer steps of each training
model: str = "test_resnet"  # a small one, made for tests
image_size: int = 64  # 0: the model's own
weights: str = ""  # a file; "" trains the model on other images first
data_dir: str = ""  # "" draws images
large: bool = True  # plan two models of usual size, too: two minutes

# %%
import tempfile
from pathlib import Path

from labkit import Script
from labkit_labs import Lesson, draw
from labkit_labs.labs.small_data import accuracy, filled, strip

lab, folder = Lesson("23_images", ranks=nproc_per_node), Path(tempfile.mkdtemp(prefix="images-"))
draw.replicas(nproc_per_node, 8)

# %% [markdown]
# ## Your predictions
#
# The model is a residual network with BatchNorm. The trained weights have seen discs, squares and triangles; they will
# be trained further on rings, frames and crosses, once on two ranks and once on one, with the same global batch.

# %%
start = lab.ask("test loss from trained weights: how many times that from random ones", default=0.95, unit="times")
visibly = {"only by rounding": 1e-6, "visibly": 0.01}
apart = lab.ask("two ranks and one: relative difference of the first losses", default=1e-6, options=visibly)
unprepared = lab.ask("accuracy if test images are only scaled to 0…1, not normalized", default=90, unit="%")

# %% [markdown]
# ## Data and weights
#
# The images are in `train/<class>` and `test/<class>`. Without a file from a hub, the model first learns three other
# shapes. `export_dir` names a folder for what a hub would give you.

# %%
data_dir = data_dir or filled(folder / "images", ["ring", "frame", "cross"])
display(strip(data_dir))
classes = len([*Path(data_dir, "train").iterdir()])
common = {"image_size": image_size, "model": model, "global_batch_size": 32}
if not weights:
    other = filled(folder / "other", ["disc", "square", "triangle"], seed=1)
    first = Script.load("ddp", "export", task="images")
    lab.launch(first, **common, data_dir=other, classes=3, steps=5 * steps // 2, lr=1e-3, export_dir=folder / "hub")
    weights = folder / "hub" / "model.safetensors"

# %% [markdown]
# ## Three runs
#
# All three see the same images in the same order.

# %%
WAYS = {"random": ("ddp", 2), "trained": ("ddp", 2), "trained, one rank": ("single", 1)}
runs = {}
for name, (strategy, ranks) in WAYS.items():
    script = Script.load(strategy, "validate", "export", task="images")
    known = {"weights": weights} if name.startswith("trained") else {}
    options = common | known | {"data_dir": data_dir, "classes": classes, "validate_every": steps // 4, "lr": 3e-4}
    options |= {"ranks": min(ranks, lab.ranks), "export_dir": folder / name, "shown": False}
    runs[name] = lab.launch(script, steps=steps, **options)

# %%
test = {name: run.metrics().dropna(subset=["test_loss"]).drop_duplicates("step") for name, run in runs.items()}
last = {name: table["test_loss"].iloc[-1] for name, table in test.items()}
two, one = (runs[name].losses().loc[1:5] for name in ("trained", "trained, one rank"))
lab.verify(start, 0.75, last["trained"] / last["random"], "times", how="at most")
lab.verify(apart, 0.01, (two / one - 1).abs().max(), how="at least")
curves = {name: [*zip(table["step"], table["test_loss"], strict=True)] for name, table in test.items()}
draw.curves(curves, "loss on the test images", log=True)

# %% [markdown]
# The start matters more than the number of ranks. The losses of one rank and two differ from the first step on, because
# each of two ranks normalizes over 16 images, not 32. With 16 or more per GPU that hardly affects the result. With two
# or four, as in detection or segmentation, the means are noisy. `SyncBatchNorm` then takes the mean and variance over
# all ranks, with a collective in every such layer, in forward and in backward:
#
# ```python
# model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # before DDP wraps it; on GPUs only
# ```
#
# In labkit that is `labkit.launch(script, sync_batch_norm=True)`. Models with LayerNorm or GroupNorm, such as ViT and
# ConvNeXt, do not need it.
#
# ## Leave
#
# The file has parameters and buffers, and plain `timm` loads it. Images must be prepared as in training: with the same
# size, and with the mean and standard deviation that the weights expect.

# %%
import timm
from safetensors.torch import load_file

preset = timm.models.get_pretrained_cfg(model)
size = {"img_size": image_size} if image_size and preset.fixed_input_size else {}
own = timm.create_model(model, num_classes=classes, **size)
own.load_state_dict(load_file(folder / "trained" / "model.safetensors"))

side = image_size or preset.input_size[-1]
normalized = accuracy(own, data_dir, side, preset.mean, preset.std)
only_scaled = accuracy(own, data_dir, side, mean=(0, 0, 0), std=(1, 1, 1))
print(f"right of the test images: normalized {normalized:.0%}, only scaled {only_scaled:.0%}")
lab.verify(unprepared, 0.6, only_scaled, "%", how="at most")
lab.score()

# %% [markdown]
# Nothing fails; the answers are simply wrong. A file of weights is worth little if you do not know how its images were
# prepared. For a model from timm's hub, this prepares them:
#
# ```python
# transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
# ```
#
# ## On 2 × T4 and 8 × A100
#
# A ViT-B has 86 million parameters, a ResNet-50 has 26 million. Which of the two needs more memory for 64 images of
# 224 × 224 on each T4? (On eight devices that is 16 each.)

# %%
if large:
    ddp = Script.load("ddp", "precision", "recompute_and_compile", task="images")
    sizes = {"ViT-B": "vit_base_patch16_224", "ResNet-50": "resnet50"}
    ways = {f"{name}{text}": (ddp, {"model": named, "activation_checkpointing": recompute})
            for name, named in sizes.items() for text, recompute in (("", False), (", recomputed", True))}  # fmt: skip
    display(lab.plans(ways, data_dir=data_dir, precision="fp16", global_batch_size=128))
else:
    print("(the plan is skipped on this page: set large = True)")

# %% [markdown]
# The ViT does: it has three times as many parameters, and larger activations. It gains more if blocks are recomputed:
# each of its 12 blocks keeps only its input, 197 × 768 numbers per image, while the first ones of the ResNet have 256 ×
# 56 × 56.
#
# ## Try this
#
# 1. How many numbers does a ResNet-50 have besides its parameters, and a ViT-B?
#    <details><summary>Answer</summary>53,173, beside 25,557,032 parameters: a mean and a variance for each channel, and
#    a counter for each BatchNorm. A ViT-B has none: LayerNorm looks at one sample at a time.</details>
# 2. Prepare the test images at 32 or 128 pixels instead of 64.
#    <details><summary>Answer</summary>64 and 60 of 90 are right. The network takes any size, but the shapes that it has
#    learned had another.</details>
# 3. Train with `lr=3e-3` from random and from trained weights: does the start still matter?
#    <details><summary>Answer</summary>Yes. After 40 steps the test loss was 0.109 from random weights and 0.0075 from
#    trained ones. The larger rate suits both, though.</details>
#
# ## Sources
#
# He et al., *Deep Residual Learning* (arXiv 1512.03385). Ioffe and Szegedy, *Batch Normalization* (arXiv 1502.03167).
# huggingface.co/docs/timm. docs/how_to/models.md.

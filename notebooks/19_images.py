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
# *About three minutes on a laptop's CPU. You should know what DDP (lab 03) and FSDP (lab 07) do. Needs `timm`.*
#
# You have a folder of pictures, one subfolder for each class, and the name of a model. This lab asks what two T4s hold,
# trains a small residual network from random weights and from trained ones, and leaves with a file that plain `timm`
# loads.
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
large: bool = True  # plan two models of usual size for two T4s: a minute or two

# %%
import random
import tempfile
from pathlib import Path

import timm
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

import labkit
from labkit import Script
from labkit.claims import Claims

on_gpus = labkit.doctor().gpu_count >= nproc_per_node
env = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
claims = Claims("19_images")
folder = Path(tempfile.mkdtemp(prefix="images-"))

# %% [markdown]
# ## The data
#
# Pictures in `train/<class>` and `test/<class>`. These are drawn: a filled shape somewhere, in some colour.


# %%
def draw(shape, size=72):
    picture = Image.new("RGB", (size, size), tuple(random.choices(range(90), k=3)))
    width = random.randint(20, 40)
    left, top = (random.randint(0, size - width) for _ in range(2))
    box, colour = (left, top, left + width, top + width), tuple(random.choices(range(120, 256), k=3))
    pen, middle = ImageDraw.Draw(picture), left + width // 2
    if shape == "disc":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(left, top + width), (left + width, top + width), (middle, top)], fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=4)
    elif shape == "frame":
        pen.rectangle(box, outline=colour, width=4)
    else:
        pen.line([(left, top), box[2:]], fill=colour, width=5)
        pen.line([(left, top + width), (left + width, top)], fill=colour, width=5)
    return picture


def fill(root, shapes, counts=(("train", 120), ("test", 30))):
    for part, count in counts:
        for shape in shapes:
            (root / part / shape).mkdir(parents=True)
            for number in range(count):
                draw(shape).save(root / part / shape / f"{number}.png")
    return root


random.seed(0)
if not data_dir:
    data_dir = fill(folder / "pictures", ["ring", "frame", "cross"])
classes = len([*Path(data_dir, "train").iterdir()])
examples = sorted(Path(data_dir, "train").glob("*/*.*"))[:: max(1, len([*Path(data_dir, "train").glob("*/*.*")]) // 8)]
strip = Image.new("RGB", (80 * len(examples), 72))
for place, path in enumerate(examples):
    strip.paste(Image.open(path).convert("RGB").resize((72, 72)), (80 * place, 0))
display(strip)

# %% [markdown]
# ## Look: what would two T4s hold?
#
# Guess first: a ViT-B has 86 million parameters, a ResNet-50 has 26 million. AdamW in fp32 takes 16 bytes for each.
# Which of the two needs more memory for a batch of 64 pictures of 224 × 224 on each GPU?

# %%
if large:
    for name in ("vit_base_patch16_224", "resnet50"):
        for extras in (["precision"], ["precision", "recompute_and_compile"]):
            plan = labkit.plan(
                Script.load("ddp", *extras, task="images"), device="2xT4", model=name, data_dir=data_dir,
                precision="fp16", global_batch_size=128, **({"activation_checkpointing": True} if extras[1:] else {}),
            )  # fmt: skip
            held = f"{plan.bytes / 2**30:.1f} GiB at the peak" if plan.bytes else "not planned"
            print(f"{name}, {'recomputed' if extras[1:] else 'activations kept'}: {held}")

# %% [markdown]
# ## Weights
#
# Without a file from a hub, the model first learns three other shapes. `export_dir` writes what a hub would give you.

# %%
common = {"nproc_per_node": nproc_per_node, "image_size": image_size, "model": model, "env": env, "wait": True}
if not weights:
    other = fill(folder / "other", ["disc", "square", "triangle"])
    labkit.launch(
        Script.load("ddp", "export", task="images"), **common, data_dir=other, classes=3, steps=5 * steps // 2,
        global_batch_size=32, lr=1e-3, export_dir=folder / "hub",
    )  # fmt: skip
    weights = folder / "hub" / "model.safetensors"

# %% [markdown]
# ## Predict
#
# `timm` names and counts the weights. Does the start matter more than the strategy? Say by how much trained weights
# lower the loss on the test pictures.

# %%
size = {"img_size": image_size} if image_size and timm.models.get_pretrained_cfg(model).fixed_input_size else {}
own = timm.create_model(model, num_classes=classes, **size)
claims.predict("numbers in the exported file", sum(tensor.numel() for tensor in own.state_dict().values()))
claims.predict("test loss from trained weights, over that from random ones", 0.75, how="at most")
claims.predict("largest relative difference of a loss, FSDP to DDP", 1e-2, how="at most")
display(claims)

# %% [markdown]
# ## Train
#
# The same pictures in the same order, three times. The images are normalised as the model's weights expect it.

# %%
TRAININGS = {"random, DDP": ("ddp", {}), "trained, DDP": ("ddp", {"weights": weights}),
             "trained, FSDP": ("fsdp", {"weights": weights})}  # fmt: skip
runs = {
    name: labkit.launch(
        Script.load(strategy, "validate", "export", task="images"), **common, **options, data_dir=data_dir,
        steps=steps, global_batch_size=32, classes=classes, lr=3e-4, validate_every=steps // 4,
        export_dir=folder / f"{name.replace(', ', '-')}-out",
    )
    for name, (strategy, options) in TRAININGS.items()
}  # fmt: skip

# %%
labkit.compare(list(runs.values()))

# %% [markdown]
# ## Measure


# %%
def last(name, column):
    return runs[name].metrics()[column].dropna().iloc[-1]


file = folder / "trained-FSDP-out" / "model.safetensors"
exported = load_file(file)
claims.measure("numbers in the exported file", sum(t.numel() for t in exported.values()), run=runs["trained, FSDP"])
ratio = last("trained, DDP", "test_loss") / last("random, DDP", "test_loss")
claims.measure("test loss from trained weights, over that from random ones", ratio, run=runs["trained, DDP"])
difference = (runs["trained, FSDP"].losses() / runs["trained, DDP"].losses() - 1).abs().max()
claims.measure("largest relative difference of a loss, FSDP to DDP", difference, run=runs["trained, FSDP"])
print({name: f"{last(name, 'test_accuracy'):.0%} right" for name in runs})

# %% [markdown]
# ## Leave
#
# Plain `timm`, without labkit. The pictures must be prepared as in the training: size, mean and spread.

# %%
own.load_state_dict(exported)
preset = timm.models.get_pretrained_cfg(model)
mean, spread = (torch.tensor(each)[:, None, None] for each in (preset.mean, preset.std))
side = image_size or preset.input_size[-1]
names = sorted(path.name for path in Path(data_dir, "train").iterdir())
for name in names:
    path = next(Path(data_dir, "test", name).iterdir())
    pixels = torch.frombuffer(
        bytearray(Image.open(path).convert("RGB").resize((side, side)).tobytes()), dtype=torch.uint8
    )
    picture = (pixels.view(side, side, 3).permute(2, 0, 1) / 255 - mean) / spread
    with torch.no_grad():
        print(f"{path.parent.name}: {names[own.eval()(picture[None]).argmax()]}")

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - BatchNorm keeps a running mean on each rank. Which rank's is in the exported file?
# - `model="test_vit"`, a transformer: how many pictures does it want before it beats the residual network?
# - `lr=3e-3` in the three trainings: does the start still matter?

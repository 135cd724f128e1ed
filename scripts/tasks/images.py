"""Folders of images, one per class, and a model of timm, torchvision or your own: --data-dir has train/ and val/."""

# %% hub
from difflib import get_close_matches
from importlib import import_module

import torch
from torch import nn

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of red, green and blue


def hub_arguments(parser):
    parser.add_argument("--model", default="", help="a timm model (vit_tiny_patch16_224), or torchvision:resnet50")
    parser.add_argument("--pretrained", action="store_true", help="load pretrained weights for all but the last layer")
    parser.add_argument("--weights", default="", help="file of weights, .pth or .safetensors, instead of a download")
    parser.add_argument("--image-size", type=int, default=0, help="height and width (default: the model's own, or 64)")


def library_of(args):
    """(timm or torchvision.models, the model's name in it)."""
    library, _, name = args.model.rpartition(":")
    library = library or "timm"
    try:
        models = import_module(f"{library}.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
        raise SystemExit(f"--model {args.model} needs {library} ({error}): pip install {library}, in the version for "
                         f"torch {torch.__version__}") from error  # fmt: skip
    names = models.list_models(**({"module": models} if library == "torchvision" else {}))
    names += models.list_pretrained() if library == "timm" else []
    if name not in names:
        close = ", ".join(get_close_matches(name, names, n=4)) or "none"
        raise SystemExit(f"--model {args.model}: {library} has no such model; close names: {close}")
    return models, name


def inputs_of(args):
    """(height and width, mean, spread) of the images that the weights of --model were trained on."""
    size, colours = 64, IMAGENET
    if args.model:
        models, name = library_of(args)
        if hasattr(models, "get_pretrained_cfg"):  # timm
            preset = models.get_pretrained_cfg(name)
            size, colours = preset.input_size[-1], (preset.mean, preset.std)
        else:
            preset = models.get_model_weights(name).DEFAULT.transforms()
            size, colours = preset.crop_size[0], (preset.mean, preset.std)
    return args.image_size or size, *(torch.tensor(each)[:, None, None] for each in colours)


def from_hub(args, classes):
    """The model with a new last layer."""
    models, name = library_of(args)
    download = args.pretrained and not args.weights
    try:
        if hasattr(models, "create_model"):  # timm
            fixed = models.get_pretrained_cfg(name).fixed_input_size
            size = {"img_size": args.image_size} if args.image_size and fixed else {}
            model = models.create_model(name, pretrained=download, num_classes=classes, **size)
        else:
            model = models.get_model(name, weights="DEFAULT" if download else None)
            linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
            if not linear:
                raise SystemExit(f"--model {args.model}: its last layer is not a Linear, which --classes could replace")
            model.set_submodule(linear[-1], nn.Linear(model.get_submodule(linear[-1]).in_features, classes))
    except OSError as error:
        raise SystemExit(
            f"--pretrained: {str(error).splitlines()[0]}. Without internet, pass the file of --model with --weights"
        ) from error
    return model


def read_weights(model, path):
    """All tensors but those of the last layer must be in the file, in their shapes."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        weights = load_file(path)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        weights = weights.get("state_dict", weights.get("model", weights))  # a training checkpoint
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape}
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    missing = {name for name in own.keys() - fitting if not name.endswith("num_batches_tracked")}
    if wrong := sorted(name for name in missing if not name.startswith(last)):
        raise SystemExit(f"--weights {path} does not fit the model: {', '.join(wrong[:3])}, {len(wrong)} in all")
    model.load_state_dict(fitting, strict=False)


# %% model
import torch
from torch import nn


class Block(nn.Module):  # two convolutions around a shortcut, which halves the image where the width grows
    def __init__(self, before, width):
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        inside = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.shortcut(x) + self.norm2(self.second(inside)))


class ResNet(nn.Module):  # (batch, 3, height, width) in, (batch, classes) out
    def __init__(self, classes, widths=(32, 32, 64, 64, 128, 128)):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 2, padding=1), nn.MaxPool2d(2))
        blocks = (Block(*pair) for pair in zip((widths[0], *widths), widths, strict=False))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def embed(self, images):
        return self.stem(images)

    def unembed(self, x):
        return self.head(x.mean((2, 3)))

    def forward(self, images):
        return self.unembed(self.blocks(self.embed(images)))


def model_arguments(parser):
    parser.add_argument("--classes", type=int, default=10, help="outputs of the model; there may be fewer folders")


def Model():
    args = parse_args()
    model = from_hub(args, args.classes) if args.model else ResNet(args.classes)
    if args.weights:
        read_weights(model, args.weights)
    return model


# %% data
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset


def augment(picture, size):
    """A training image, (3, height, width) of values from 0 to 1 and an eighth too large: cropped and mirrored."""
    top, left = torch.randint(picture.shape[1] - size + 1, (2,)).tolist()
    picture = picture[:, top : top + size, left : left + size]
    return picture.flip(2) if torch.rand(()) < 0.5 else picture


def middle(picture, size):
    margin = (picture.shape[1] - size) // 2
    return picture[:, margin : margin + size, margin : margin + size]


class Pictures(Dataset):
    """(image, class), normalized; images for training are augmented."""

    def __init__(self, folder, augmented, size, mean, spread):
        self.augmented, self.size, self.mean, self.spread = augmented, size, mean, spread
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        files = [(path, number) for number, name in enumerate(self.classes) for path in Path(folder, name).rglob("*.*")]
        self.files = sorted(file for file in files if file[0].suffix.lower() in Image.registered_extensions())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, number = self.files[index]
        larger = self.size * 9 // 8
        with Image.open(path) as opened:
            if opened.mode.startswith("I"):  # 16-bit images, which convert() would clip
                opened = Image.fromarray((numpy.array(opened) >> 8).astype(numpy.uint8))
            pixels = torch.from_numpy(numpy.array(ImageOps.fit(opened.convert("RGB"), (larger, larger))))
        picture = (augment if self.augmented else middle)(pixels.permute(2, 0, 1) / 255, self.size)
        return (picture - self.mean) / self.spread, number


def load_datasets(data_dir):
    """(train, test) from the folders train/<class>/ and val/<class>/. Without val/ every tenth image is held out;
    without train/ the classes are looked for in the folder itself."""
    folder = Path(data_dir, "train") if Path(data_dir, "train").is_dir() else Path(data_dir)
    parts = [Path(data_dir, name) for name in ("validation", "valid", "val", "test")]
    held_out = next((part for part in parts if part.is_dir()), folder)
    if not data_dir or not folder.is_dir():
        raise SystemExit(f"--data-dir {data_dir or '(none)'} must be a folder with train/<class>/ and val/<class>/")
    args = parse_args()
    train, test = (Pictures(part, part == folder, *inputs_of(args)) for part in (folder, held_out))
    if train.classes != test.classes or len(train.classes) < 2:
        folders = (
            f"{', '.join(part.classes[:5]) or 'none'} in {path}" for part, path in ((train, folder), (test, held_out))
        )
        raise SystemExit(
            f"--data-dir must have the same two classes or more in train/ and val/, not {' and '.join(folders)}"
        )
    if held_out == folder:
        train.files, test.files = [f for i, f in enumerate(train.files) if i % 10], test.files[::10]
        test.augmented = False
    classes = getattr(args, "classes", len(train.classes))
    if len(train.classes) > classes:
        raise SystemExit(f"{data_dir} has {len(train.classes)} classes: set --classes, now {classes}")
    return train, test

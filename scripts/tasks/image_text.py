"""Images and their descriptions brought together: two towers, as CLIP's, and a contrastive loss over all ranks."""

# %% hub
# of causal_lm.py

# %% configuration
TEXT = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0}  # fmt: skip
VISION = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 4}  # fmt: skip


def configuration(args):
    """That of --model; without it, of a small model."""
    config = config_of(args, "clip", text_config=TEXT, vision_config=VISION, projection_dim=32)
    if not hasattr(config, "vision_config"):
        raise SystemExit(f"--model {args.model} is a {config.model_type} without images: this task trains CLIP models")
    return config


# %% model
from torch import nn
from transformers import AutoModel


def Model():
    args = parse_args()
    model = model_of(AutoModel, configuration(args), args)
    if not hasattr(model, "logit_scale") or hasattr(model, "logit_bias"):
        raise SystemExit(f"--model {args.model} is a {type(model).__name__}: this task's loss is that of a CLIP model")
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))  # fully_shard does not support scalars
    return model


# %% splits
# of causal_lm.py

# %% data
import datasets
import numpy
import torch
from PIL import Image
from torch.utils.data import Dataset

MEAN, SPREAD = torch.tensor([0.481, 0.458, 0.408])[:, None, None], torch.tensor([0.269, 0.261, 0.276])[:, None, None]


def data_arguments(parser):
    parser.add_argument("--context", type=int, default=64, help="maximum tokens of a text; longer ones are truncated")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--image-column", default="image")


class Pairs(Dataset):
    """An image and the tokens of its description, padded with the end token."""

    def __init__(self, rows, tokenizer, config, args):
        self.rows, self.tokenizer, self.args = rows, tokenizer, args
        self.size, self.end = config.vision_config.image_size, config.text_config.eos_token_id or 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        image = row[self.args.image_column].convert("RGB").resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = (torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 255 - MEAN) / SPREAD
        text = row[self.args.text_column]
        if self.tokenizer:
            kept = self.tokenizer(text, truncation=True, max_length=self.args.context)["input_ids"]
        else:
            kept = [*text.encode()][: self.args.context - 1] + [self.end]
        rest = self.args.context - len(kept)
        mask = torch.tensor([1] * len(kept) + [0] * rest)
        return {"input_ids": torch.tensor(kept + [self.end] * rest), "attention_mask": mask, "pixel_values": pixels}


def load_datasets(data_dir):
    """(train, test) of images and descriptions: a folder of images with a metadata.jsonl of file_name and text, or a
    dataset on huggingface.co; by default squares in a colour and a place, and their descriptions."""
    datasets.disable_progress_bars()
    args = parse_args()
    config = configuration(args)
    check_context(args, config)
    parts = read(data_dir) if data_dir else {"train": squares(900), "test": squares(100)}
    first = parts["train"][0]
    if missing := {args.text_column, args.image_column} - {*first}:
        raise SystemExit(f"{data_dir} has the columns {', '.join(first)}, not {', '.join(sorted(missing))}: "
                         "name them with --text-column and --image-column")  # fmt: skip
    return tuple(Pairs(parts[name], tokenizer_of(args, config), config, args) for name in ("train", "test"))


def squares(number, size=32):
    colours = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    random, rows = numpy.random.default_rng(number), []
    for _ in range(number):
        name, top, left = random.choice([*colours]), *(int(place) for place in random.integers(0, size - 8, 2))
        pixels = numpy.zeros((size, size, 3), dtype=numpy.uint8)
        pixels[top : top + 8, left : left + 8] = colours[name]
        rows.append({"image": Image.fromarray(pixels), "text": f"a {name} square, {left} from the left, {top} down"})
    return rows


# %% task
import torch
import torch.distributed as dist
from torch.nn import functional as F


def outputs_of(model, batch):
    """Only calls the model, whose outputs are unit vectors of this rank's images and texts, and the scale."""
    outputs = model(**batch)
    return outputs.image_embeds, outputs.text_embeds, outputs.logits_per_text


def count_of(batch):
    """The number of predictions, a tensor: the text of each image and the image of each text."""
    return torch.tensor(2 * len(batch["input_ids"]), device=batch["input_ids"].device)


class AllGather(torch.autograd.Function):
    """The rows of all ranks. Backward adds up what the losses of all ranks ask of this rank's rows."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def scores_of(outputs):
    """This rank's images against the texts of all ranks, its texts against all images, and where the right ones are.
    Gradients go back to the ranks that the vectors came from. In an evaluation, a rank's batch is compared alone."""
    images, texts, own = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in outputs)
    cosines = texts @ images.T
    scale = (own * cosines).sum() / cosines.square().sum()  # the model's, whose parameter may be on another rank
    together = torch.is_grad_enabled()
    all_images, all_texts = (AllGather.apply(part) if together else part for part in (images, texts))
    right = torch.arange(len(images), device=images.device) + together * dist.get_rank() * len(images)
    return scale * images @ all_texts.T, scale * texts @ all_images.T, right


def loss_of(outputs, batch):
    """The sum of their losses, not the mean. Micro-batches are compared each by itself."""
    by_image, by_text, right = scores_of(outputs)
    return F.cross_entropy(by_image, right, reduction="sum") + F.cross_entropy(by_text, right, reduction="sum")


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    by_image, by_text, right = scores_of(outputs)
    hits = (by_image.argmax(-1) == right).sum() + (by_text.argmax(-1) == right).sum()
    return {"accuracy": (hits, count_of(batch))}

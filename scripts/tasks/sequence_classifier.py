"""A text classifier of transformers, on texts of any length."""

# %% hub
# of causal_lm.py

# %% configuration
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
         "num_attention_heads": 4}  # fmt: skip


def configuration(args):
    """That of --model; without it, of a small model. Decoders find the last token of a text by the padding after it."""
    config = config_of(args, "bert", **SIZES)
    text, tokenizer = config.get_text_config(), tokenizer_of(args, config)
    if tokenizer and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    known = getattr(text, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None), 0
    text.pad_token_id = next(token for token in known if token is not None)
    text.use_cache = False  # no cache of keys and values: a classifier does not generate
    return config


# %% model
from transformers import AutoModelForSequenceClassification

NEW = ("classifier", "pre_classifier", "classification_head", "pooler", "score")  # often missing in pretrained weights


def model_arguments(parser):
    parser.add_argument("--classes", type=int, default=2, help="labels are 0 to this number - 1, or their names")


def Model():
    args = parse_args()
    config = configuration(args)
    config.num_labels = args.classes
    return model_of(AutoModelForSequenceClassification, config, args, new=NEW)


# %% splits
# of causal_lm.py

# %% data
import os
from functools import cache, partial
from pathlib import Path

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence


def data_arguments(parser):
    parser.add_argument("--context", type=int, default=128, help="maximum tokens of a text; longer ones are truncated")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")


def load_datasets(data_dir):
    """(train, test) of texts and labels: a folder of .csv, .jsonl or .parquet files, or a dataset on huggingface.co;
    by default lines of Python's standard library, and whether they open a block."""
    datasets.disable_progress_bars()
    args = parse_args()
    parts = read(data_dir) if data_dir else lines()
    columns = parts["train"].column_names
    if missing := {args.text_column, args.label_column} - {*columns}:
        raise SystemExit(f"{data_dir} has the columns {', '.join(columns)}, not {', '.join(sorted(missing))}: "
                         "name them with --text-column and --label-column")  # fmt: skip
    parts = complete(parts, args.text_column, args.label_column)
    labels = {label for part in parts.values() for label in part[args.label_column]}
    numbers = {label: int(label) for label in labels if isinstance(label, int)}  # bool, too
    if len(numbers) < len(labels):
        numbers = {label: number for number, label in enumerate(sorted(labels, key=str))}
        print(f"labels: {', '.join(f'{number} {label}' for label, number in numbers.items())}", flush=True)
    if min(numbers.values()) < 0:
        raise SystemExit(f"{data_dir} has the label {min(numbers.values())}: its labels are hidden; use other data")
    if max(numbers.values()) >= args.classes:
        raise SystemExit(f"{data_dir} has the label {max(numbers.values())}: set --classes {max(numbers.values()) + 1}")
    config = configuration(args)
    check_context(args, config)
    encode = partial(
        encoded, text=args.text_column, label=args.label_column, numbers=numbers, tokenizer=tokenizer_of(args, config),
        context=args.context,
    )  # fmt: skip
    encoded_parts = (part.map(encode, batched=True, remove_columns=columns) for part in parts.values())
    return with_known_tokens(args, config, *encoded_parts)


def lines(limit=2**18, longest=128):
    text = b"\n".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))[:limit]
    texts = [line for line in text.decode(errors="replace").splitlines() if 8 <= len(line) <= longest]
    columns = {"text": [line[:-1] for line in texts], "label": [int(line.endswith(":")) for line in texts]}
    return datasets.Dataset.from_dict(columns).train_test_split(0.1, shuffle=False)


def encoded(columns, text, label, numbers, tokenizer, context):
    if tokenizer:
        ids = tokenizer(columns[text], truncation=True, max_length=context)["input_ids"]
    else:
        ids = [[*each.encode()][:context] for each in columns[text]]
    return {"input_ids": ids, "labels": [numbers[each] for each in columns[label]]}


@cache
def padding():
    return configuration(parse_args()).get_text_config().pad_token_id


def collate(samples):
    """Pads on the right to the longest text; padding is not attended to."""
    texts = [sample["input_ids"] for sample in samples]
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    ids = pad_sequence(texts, batch_first=True, padding_value=padding())
    return {"input_ids": ids, "attention_mask": mask}, torch.stack([sample["labels"] for sample in samples])


# %% task
import torch
from torch.nn import functional as F


def outputs_of(model, batch):
    """Only calls the model: a pipeline replaces this call by its stages."""
    return model(**batch[0])


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch[1] != -100).sum()


def loss_of(outputs, batch):
    """The sum of their losses, not the mean; in fp32 or wider, for fp16 overflows and bf16 has two digits."""
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    return F.cross_entropy(logits, batch[1], reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    return {"accuracy": ((outputs.logits.argmax(-1) == batch[1]).sum(), count_of(batch))}

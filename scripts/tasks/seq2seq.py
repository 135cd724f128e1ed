"""A sequence-to-sequence model of transformers, such as T5, on pairs of texts of any length."""

# %% hub
# of causal_lm.py

# %% configuration
SIZES = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0}  # fmt: skip


def configuration(args):
    """That of --model; without it, of a small model."""
    config = config_of(args, "t5", **SIZES)
    if not config.is_encoder_decoder:
        raise SystemExit(f"--model {args.model} is a {config.model_type} without encoder and decoder: use causal_lm")
    return config


# %% model
from transformers import AutoModelForSeq2SeqLM


def Model():
    args = parse_args()
    return model_of(AutoModelForSeq2SeqLM, configuration(args), args)


# %% splits
# of causal_lm.py

# %% data
import os
from functools import partial
from pathlib import Path

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence


def data_arguments(parser):
    parser.add_argument("--context", type=int, default=128, help="maximum tokens of a text; longer ones are truncated")
    parser.add_argument("--source-column", default="source")
    parser.add_argument("--target-column", default="target")


def load_datasets(data_dir):
    """(train, test) of pairs of texts: a folder of .csv, .jsonl or .parquet files, or a dataset on huggingface.co; by
    default lines of Python's standard library in capitals, and as they are."""
    datasets.disable_progress_bars()
    args = parse_args()
    parts = read(data_dir) if data_dir else lines()
    columns = parts["train"].column_names
    if missing := {args.source_column, args.target_column} - {*columns}:
        raise SystemExit(f"{data_dir} has the columns {', '.join(columns)}, not {', '.join(sorted(missing))}: "
                         "name them with --source-column and --target-column")  # fmt: skip
    config = configuration(args)
    check_context(args, config)
    encode = partial(
        encoded, source=args.source_column, target=args.target_column, tokenizer=tokenizer_of(args, config),
        config=config, context=args.context,
    )  # fmt: skip
    return with_known_tokens(args, config, *(
        part.map(encode, batched=True, remove_columns=columns)
        for part in complete(parts, args.source_column, args.target_column).values()
    ))  # fmt: skip


def lines(limit=2**18, longest=128):
    text = b"\n".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))[:limit]
    texts = [line.strip() for line in text.decode(errors="replace").splitlines() if 8 <= len(line) <= longest]
    columns = {"source": [line.upper() for line in texts], "target": texts}
    return datasets.Dataset.from_dict(columns).train_test_split(0.1, shuffle=False)


def encoded(columns, source, target, tokenizer, config, context):
    """Ids of the source, what the decoder reads, and what it has to predict: the same, one position earlier."""
    if tokenizer:  # targets may need another vocabulary or language token
        cut = {"truncation": True, "max_length": context}
        sources = tokenizer(columns[source], **cut)["input_ids"]
        targets = tokenizer(text_target=columns[target], **cut)["input_ids"]
    else:
        sources, targets = (
            [[*text.encode()][: context - 1] + [config.eos_token_id] for text in columns[name]]
            for name in (source, target)
        )
    start = next(each for each in (config.decoder_start_token_id, config.pad_token_id, 0) if each is not None)
    return {"input_ids": sources, "decoder_input_ids": [[start, *ids[:-1]] for ids in targets], "labels": targets}


def collate(samples):
    """Pads on the right to the longest texts; padding is neither attended to nor predicted."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    return {
        name: pad_sequence(column, batch_first=True, padding_value=-100 if name == "labels" else 0)
        for name, column in columns.items()
    }


# %% task
import torch
from torch.nn import functional as F


def outputs_of(model, batch):
    """Only calls the model: a pipeline replaces this call by its stages. With labels it would average."""
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False)


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch["labels"] != -100).sum()


def loss_of(outputs, batch):
    """The sum of their losses, not the mean; in fp32 or wider, for fp16 overflows and bf16 has two digits."""
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    return {"accuracy": ((outputs.logits.argmax(-1) == batch["labels"]).sum(), count_of(batch))}

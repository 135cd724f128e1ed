"""A causal language model of transformers, trained on texts of any length."""

# %% hub
import os
from functools import cache
from pathlib import Path

import pyarrow.compute
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar


def hub_arguments(parser):
    parser.add_argument("--model", default="", help="a name on huggingface.co, a folder or a config.json")
    parser.add_argument("--pretrained", action="store_true", help="start from the weights of --model")


def from_hub(kind, name, **options):
    """kind.from_pretrained(name), or in one sentence why not."""
    disable_progress_bar()
    try:
        return kind.from_pretrained(name, **options)
    except OSError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if not Path(name).exists():
            reason += ". Without internet, pass the folder of a downloaded model; Kaggle's are in /kaggle/input"
            reason = "there is no such folder" if name.startswith(("/", ".", "~")) else reason
        raise SystemExit(f"--model {name}: {reason}") from error


def config_of(args, kind, **sizes):
    """The configuration of --model; without it, that of a small model of this kind."""
    return from_hub(AutoConfig, args.model) if args.model else AutoConfig.for_model(kind, **sizes)


def model_of(auto_class, config, args, new=()):
    """Without --pretrained the weights are random. With it they are memory-mapped from the model's files, shared by all
    ranks, until `placed` copies what a rank needs. The files need not have weights whose names start with `new`."""
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below
    try:
        if not args.pretrained:
            return auto_class.from_config(config, dtype="float32")
        if not args.model:
            raise SystemExit("--pretrained needs --model: the name or folder of the model whose weights it loads")
        # with base: options |= base_options(args)
        model, report = from_hub(auto_class, args.model, config=config, dtype="auto", **options)
    except ValueError as error:  # this auto_class has no model for the configuration's class
        raise SystemExit(f"--model {args.model}: {str(error).splitlines()[0]}") from error
    wrong = [f"{name} is {list(file)} there and {list(own)} in the model" for name, file, own in
             sorted(report["mismatched_keys"]) if not name.startswith(tuple(new))]  # fmt: skip
    if wrong:
        raise SystemExit(f"--model {args.model}: {len(wrong)} weights have another shape: {'; '.join(wrong[:3])}")
    if missing := [name for name in report["missing_keys"] if not name.startswith(tuple(new))]:
        raise SystemExit(f"--model {args.model} lacks {len(missing)} weights, {', '.join(sorted(missing)[:3])}: it is "
                         f"not for {auto_class.__name__}; leave --pretrained out to train it from scratch")  # fmt: skip
    return model


@cache
def tokenizer_at(model, needed):
    try:
        tokenizer, reason = AutoTokenizer.from_pretrained(model), "there is none"
    except (OSError, ValueError) as error:
        tokenizer, reason = (), " ".join(str(error).split())
    if len(tokenizer) > len(getattr(tokenizer, "all_special_tokens", ())):  # else it has only its class's defaults
        return tokenizer
    if needed:
        raise SystemExit(f"--model {model}: its tokenizer cannot be loaded: {reason}")
    print(f"--model {model} has no tokenizer: texts are read as bytes", flush=True)
    return None


def tokenizer_of(args, config):
    """The tokenizer of --model. Without one it is None, and texts are read as bytes; pretrained weights need one."""
    if not args.model or Path(args.model).is_file():
        return None
    tokenizer, size = tokenizer_at(args.model, args.pretrained), config.get_text_config().vocab_size
    if tokenizer and len(tokenizer) - len(tokenizer.all_special_tokens) > size:
        raise SystemExit(f"the tokenizer of {args.model} has {len(tokenizer)} tokens, but the model only {size}")
    return tokenizer


def with_known_tokens(args, config, *parts):
    """The data as tensors. Tokens that were added to a tokenizer may have no row in the model's embedding."""
    size = config.get_text_config().vocab_size
    for part in parts:
        largest = pyarrow.compute.max(pyarrow.compute.list_flatten(part.data.column("input_ids"))).as_py()
        if (largest or 0) >= size:
            raise SystemExit(f"the tokenizer of {args.model} produces token {largest}, but its model has only "
                             f"{size}: call resize_token_embeddings before save_pretrained")  # fmt: skip
    return tuple(part.with_format("torch") for part in parts)


def check_context(args, config):
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or args.context
    if args.context > limit:
        raise SystemExit(f"--context {args.context} exceeds the {limit} positions of the model")


# %% configuration
ENCODERS = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
MIXING = ("bloom", "falcon", "jamba", "mamba", "mamba2", "mpt", "opt", "qwen3_next")  # they ignore position_ids
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip


def configuration(args):
    """That of --model; without it, of a small model."""
    config = config_of(args, "qwen3", **SIZES)
    if config.model_type in ENCODERS and not config.is_decoder:
        raise SystemExit(f"--model {args.model} reads texts in both directions: it is not a causal language model")
    if getattr(args, "pack", False) and config.model_type in MIXING:
        raise SystemExit(f"--pack: attention of {config.model_type} would mix the texts of a row; leave --pack out")
    return config


# %% model
from transformers import AutoModelForCausalLM


def Model():
    args = parse_args()
    return model_of(AutoModelForCausalLM, configuration(args), args)


# %% splits
from pathlib import Path

import datasets


def read(data_dir):
    """The training and validation data of a folder, or of a dataset on huggingface.co. Without validation data, the
    test data takes its place, or a tenth of the training data."""
    kinds = {path.suffix for path in Path(data_dir).rglob("*.*")} if Path(data_dir).is_dir() else set()
    texts = ".txt" in kinds and not kinds & {".jsonl", ".json", ".csv", ".parquet"}
    try:
        parts = (
            datasets.load_dataset("text", data_dir=data_dir, sample_by="document")
            if texts
            else datasets.load_dataset(data_dir)
        )
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        where = "" if Path(data_dir).is_dir() else " (not a folder here, so looked up on huggingface.co)"
        raise SystemExit(f"--data-dir {data_dir}{where}: {error}") from error
    if "train" not in parts:
        raise SystemExit(f"--data-dir {data_dir} has no training data, only {', '.join(parts)}")
    held_out = next((parts[name] for name in ("validation", "test") if name in parts), None)
    if held_out is not None:
        return {"train": parts["train"], "test": held_out}
    if texts and len(parts["train"]) < 100:  # a few long texts: hold out a tenth of their paragraphs
        paragraphs = "\n\n".join(parts["train"]["text"]).split("\n\n")
        return datasets.Dataset.from_dict({"text": paragraphs}).train_test_split(0.1, shuffle=False)
    return parts["train"].train_test_split(0.1, seed=0)


def complete(parts, *columns):
    """Without rows that lack one of these."""
    return {
        name: part.filter(lambda row: all(row[column] is not None for column in columns))
        for name, part in parts.items()
    }


# %% data
import itertools
import os
from functools import partial
from pathlib import Path

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence


def data_arguments(parser):
    parser.add_argument("--context", type=int, default=128, help="maximum tokens of a row; longer texts are split")
    parser.add_argument("--pack", action="store_true", help="pack texts into rows of exactly --context tokens")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--prompt-column", default="", help="with a --completion-column: train only on completions")
    parser.add_argument("--completion-column", default="")


def load_datasets(data_dir):
    """(train, test) of texts or chats: a folder of .txt, .jsonl, .csv or .parquet files, or a dataset on
    huggingface.co; by default pieces of Python's standard library."""
    datasets.disable_progress_bars()
    args = parse_args()
    config = configuration(args)
    check_context(args, config)
    parts = read(data_dir) if data_dir else pieces(128 if args.context <= 128 else 4 * args.context)
    columns = parts["train"].column_names
    pair = args.prompt_column or "prompt", args.completion_column or "completion"
    named = args.prompt_column or args.completion_column
    used = (args.text_column,) if args.text_column in columns and not named else pair
    if not {*used} <= {*columns}:
        raise SystemExit(f"{data_dir} has the columns {', '.join(columns)}: name one of them with --text-column, or "
                         "two with --prompt-column and --completion-column")  # fmt: skip
    tokenizer = tokenizer_of(args, config)
    rows = partial(rows_of, used=used, tokenizer=tokenizer, context=args.context, pack=args.pack)
    return with_known_tokens(args, config, *(part.map(rows, batched=True, remove_columns=columns)
                                             for part in complete(parts, *used).values()))  # fmt: skip


def pieces(longest, limit=2**20):
    """Texts of random lengths."""
    limit = max(limit, 8 * longest)
    text = b"\n".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))[:limit]
    lengths = torch.randint(8, longest + 1, (limit // longest,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = [*itertools.accumulate(lengths)]
    texts = [text[end - length : end].decode(errors="replace") for end, length in zip(ends, lengths, strict=True)]
    return datasets.Dataset.from_dict({"text": texts}).train_test_split(0.1, shuffle=False)


def rows_of(columns, used, tokenizer, context, pack):
    """Rows of token ids and labels, of a batch of texts. -100 is not predicted: prompts, and the first of a text."""
    texts = [tokens_of(*parts, tokenizer=tokenizer) for parts in zip(*(columns[name] for name in used), strict=True)]
    if pack:
        texts = [tuple([*itertools.chain(*parts)] for parts in zip(*texts, strict=True))]
    rows = [
        {name: part[at : at + context] for name, part in zip(("input_ids", "labels", "starts"), text, strict=True)}
        for text in texts
        for at in range(0, len(text[0]) - (context if pack else 2) + 1, context)
    ]
    for row in rows if pack else ():  # positions restart at each text
        counted = itertools.accumulate(row["starts"], lambda at, starts: 0 if starts else at + 1, initial=-1)
        row["position_ids"] = [*counted][1:]
    return {name: [row[name] for row in rows] for name in ("input_ids", "labels", *(["position_ids"] * pack))}


def tokens_of(prompt, completion="", *, tokenizer):
    """Ids, labels, and where the text starts. A text without a completion is predicted as a whole; so is a chat, a list
    of messages, in the model's own format."""
    if isinstance(prompt, list):
        if getattr(tokenizer, "chat_template", None) is None:
            raise SystemExit("the data has chats: --model needs a tokenizer with a chat template")
        first, more = tokenizer.apply_chat_template(prompt, return_dict=True)["input_ids"], []
    elif tokenizer:
        first, more = tokenizer(prompt)["input_ids"], tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        more += end if (first + more)[-1:] != end else []
    else:
        first, more = [*prompt.encode()], [*completion.encode()]
    labels = ([-100] * len(first) if completion else first) + more
    return first + more, [-100] * bool(labels) + labels[1:], [1] * bool(labels) + [0] * len(labels[1:])


def collate(samples):
    """Packed rows are equally long, and their positions keep the texts apart. Others are padded on the right."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    if "position_ids" not in columns:
        columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    return {
        name: pad_sequence(column, batch_first=True, padding_value=-100 if name == "labels" else 0)
        for name, column in columns.items()
    }


# %% task
import torch
import torch.distributed as dist
from torch.nn import functional as F


def task_arguments(parser):
    parser.add_argument("--prompt", default="", help="shown with the model's continuation at every evaluation")
    parser.add_argument("--sample-tokens", type=int, default=32, help="tokens of the continuation")


def show_sample(model, on_device):
    """Greedy decoding. All ranks take part, because each has a part of a sharded model."""
    args = parse_args()
    if not args.prompt:
        return
    tokenizer = tokenizer_of(args, configuration(args))
    ids = torch.tensor([tokenizer(args.prompt)["input_ids"] if tokenizer else [*args.prompt.encode()]])
    length = ids.shape[1]
    for _ in range(args.sample_tokens):
        outputs = outputs_of(model, {"input_ids": on_device(ids), "attention_mask": on_device(torch.ones_like(ids))})
        ids = torch.cat([ids, outputs.logits[:, -1:].argmax(-1).cpu()], dim=1)
    if dist.get_rank() == 0:
        tokens = ids[0].tolist()
        if (end := getattr(tokenizer, "eos_token_id", None)) in tokens[length:]:
            tokens = tokens[: tokens.index(end, length)]
        print(
            "sample:",
            tokenizer.decode(tokens)
            if tokenizer
            else bytes(token % 256 for token in tokens).decode("utf-8", "replace"),
            flush=True,
        )


def outputs_of(model, batch):
    """Only calls the model: a pipeline replaces this call by its stages. With labels it would average."""
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False)


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch["labels"][:, 1:] != -100).sum()


def loss_of(outputs, batch):
    """The sum of their losses, not the mean; in fp32 or wider, for fp16 overflows and bf16 has two digits."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    hits = outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    return {"accuracy": (hits.sum(), count_of(batch))}

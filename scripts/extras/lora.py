"""LoRA: the model stays as it is, and small matrices beside its layers are trained (peft)."""

# %% adapter
import logging

from peft import LoraConfig, get_peft_model

HEADS = ("classifier", "classification_head", "score", "pooler", "head", "heads", "fc")  # new layers, so fully trained


def adapter_arguments(parser):
    parser.add_argument("--lora-rank", type=int, default=8, help="rank of the adapter matrices")
    parser.add_argument("--lora-alpha", type=float, default=16, help="scales their product by alpha / rank")
    parser.add_argument("--lora-dropout", type=float, default=0.0, help="dropout on the adapters' input")
    parser.add_argument("--lora-targets", nargs="+", default=[], metavar="NAME",
                        help="layers, such as q_proj v_proj (default: all in the repeated blocks)")  # fmt: skip


def can_be_adapted(layer):  # not the projection inside nn.MultiheadAttention, whose weight is used without it
    kind = type(layer).__name__
    return kind in ("Linear", "Conv1D", "Linear4bit") or (kind == "Conv2d" and layer.groups == 1)


def adapted(model, args):
    """Freezes all but a classification head, which is new. Before the first step the added product is 0."""
    if getattr(args, "four_bit", False) and not getattr(model, "is_loaded_in_4bit", False):
        raise SystemExit("--four-bit needs --pretrained and a --model of transformers")
    layers = {name: layer for name, layer in model.named_modules() if can_be_adapted(layer)}
    last = {name.rpartition(".")[2] for name in layers}
    if wrong := {*args.lora_targets} - last:
        raise SystemExit(f"--lora-targets {' '.join(wrong)}: the model has the layers {', '.join(sorted(last))}")
    blocks = [*model.blocks]
    # with blocks instead: blocks = blocks_of(model, needed_by="--lora-targets")
    within = {layer for block in blocks for layer in block.modules()}
    inside = [name for name, layer in layers.items() if layer in within]
    chosen = [name for name in layers if name.rpartition(".")[2] in args.lora_targets]
    model = get_peft_model(model, LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, target_modules=chosen or inside,
        modules_to_save=[name for name in HEADS if hasattr(model, name)] or None,
    ))  # fmt: skip
    trained, _ = model.get_nb_trainable_parameters()
    logging.getLogger("metrics").info("LoRA trains %(trained_parameters)s parameters", {"trained_parameters": trained})
    return model

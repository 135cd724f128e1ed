"""Activations recomputed, wholly or selectively, or kept in host memory, and torch.compile, block by block."""

# %% layers
from functools import partial

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = {"mm", "addmm", "bmm", "convolution"}


def layers_arguments(parser):
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    parser.add_argument("--selective-checkpointing", action="store_true",
                        help="recompute all but matrix products, convolutions and attention")  # fmt: skip
    parser.add_argument("--offload-activations", action="store_true",
                        help="keep what blocks save for backward in host memory")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="torch.compile each block, or a model without blocks")


def change_layers(model, args):
    """Recomputed: only a block's input or expensive results are kept. Compiled: blocks of one class share the code."""
    if args.offload_activations and (args.activation_checkpointing or args.selective_checkpointing):
        raise SystemExit("--offload-activations keeps what activation checkpointing drops: leave one of them out")
    if args.activation_checkpointing or args.selective_checkpointing:
        keeping = {"context_fn": selective} if args.selective_checkpointing else {}
        for block in model.blocks:
            # with blocks instead: for block in blocks_of(model, needed_by="activation checkpointing"):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **keeping)
    if args.compile:
        for module in model.modules():
            if hasattr(module, "experts"):  # whose number of tokens changes in every step
                module.forward = torch.compiler.disable(module.forward)
        for module in model.blocks:
            # with blocks instead: for module in blocks_of(model) or [model]:
            module.forward = torch.compile(module.forward)
    if args.offload_activations:
        if not torch.cuda.is_available():
            print("--offload-activations has no effect on the CPU: activations are in host memory", flush=True)
        for block in model.blocks:
            # with blocks instead: for block in blocks_of(model, needed_by="--offload-activations"):
            block.forward = partial(offloaded, block.forward)


def offloaded(forward, *args, **kwargs):
    to_host = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor):  # parameters stay on the device anyway
        own = isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)
        return tensor if own else to_host.pack_hook(tensor)

    def unpack(packed):
        return packed if torch.is_tensor(packed) else to_host.unpack_hook(packed)

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


def selective():
    def policy(context, operator, *args, **kwargs):
        name = operator.name().removeprefix("aten::").partition(".")[0]
        keep = name in KEPT or name.startswith("_scaled_dot_product_")  # attention, by whichever kernel
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

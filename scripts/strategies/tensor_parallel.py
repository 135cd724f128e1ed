"""Train with every layer of a block split: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% tensor
from fnmatch import fnmatch
from functools import partial

from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Layers of the Block above, the first of a pair by columns, the second by rows. Hugging Face's models bring a plan.
TENSOR_PLAN = {"qkv": "colwise", "out": "rowwise", "up": "colwise", "down": "rowwise"}
STYLES = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel(),
          # around what needs all features, such as slices of fused q, k and v
          "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
          "rowwise_split_input": RowwiseParallel(input_layouts=Replicate())}  # fmt: skip


def split(blocks, model, tensor):
    """Keeps this rank's columns or rows of each block's layers, according to the plan."""
    config, ranks = getattr(model, "config", None), tensor.size()
    if hasattr(model, "peft_config"):
        raise SystemExit("tensor parallelism cannot split a model with LoRA: use ddp, zero2 or fsdp")
    brought = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name.partition(".*.")[2]: style for name, style in brought.items() if ".*." in name} or TENSOR_PLAN
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", ranks)
    if heads % ranks:
        raise SystemExit(f"{heads} heads cannot be split across {ranks} tensor ranks")
    for block in blocks:
        names = [name for name, _ in block.named_modules()]
        if missing := [pattern for pattern in plan if not any(fnmatch(name, pattern) for name in names)]:
            raise SystemExit(f"{type(block).__name__} has no {', '.join(missing)} to split: write another TENSOR_PLAN")
        for name, style in [(name, plan[pattern]) for name in names for pattern in plan if fnmatch(name, pattern)]:
            split_layer(block, block.get_submodule(name), name, style, tensor)


def split_layer(block, layer, name, style, tensor):
    if style == "replicated_with_grad_allreduce":
        layer.forward = partial(with_summed_gradients, layer, layer.forward, tensor)
        return
    if style not in STYLES:
        raise SystemExit(f"the model's tensor-parallel plan wants {style} for {name}, which this script cannot do")
    by_columns = style.startswith("colwise")
    head = 1 if by_columns else getattr(block, "head_width", 1)  # features that must stay together
    features = layer.out_features if by_columns else layer.in_features
    if features % (tensor.size() * head):
        what = f"{features // head} {'heads' if head > 1 else 'features'} of {name}"
        raise SystemExit(f"{what} cannot be split across {tensor.size()} tensor ranks")
    parallelize_module(layer, tensor, STYLES[style])


def with_summed_gradients(layer, forward, tensor, *args, **kwargs):
    """A norm inside the heads: each rank has its heads' part of the gradient. fully_shard would drop a hook."""
    parameters = dict(layer._parameters)
    for name, p in parameters.items():
        everywhere = DTensor.from_local(p, tensor, [Replicate()], run_check=False)
        layer._parameters[name] = everywhere.to_local(grad_placements=[Partial()])
    try:
        return forward(*args, **kwargs)
    finally:
        layer._parameters.update(parameters)


# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))


def parallelize(model, mesh, device, args):
    """Each rank keeps 1/N of the layers in a block; embeddings, norms and the head stay whole on every rank."""
    blocks = model.blocks
    # with blocks instead: blocks = blocks_of(model, needed_by="tensor parallelism")
    split((block.to(device) for block in blocks), model, mesh["tensor"])
    # with precision instead: split((placed(block, device, args) for block in blocks), model, mesh["tensor"])
    return model.to(device)
    # with precision instead: return placed(model, device, args)


def make_optimizer(model, mesh, args):
    optimizer = optimizer_of(model.parameters(), args)
    for group in optimizer.param_groups:  # torch cannot update whole and split parameters together
        group["foreach"] = False
    return optimizer


# %% gradient_sync
# of single.py

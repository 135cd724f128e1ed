"""Tensor parallelism whose norms and residuals are split along the sequence as well."""

# goes with: tensor_parallel

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def strategy_arguments(parser):
    parser.add_argument("--sequence-parallel", action="store_true",
                        help="split activations along the sequence between the split layers")  # fmt: skip


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))


def parallelize(model, mesh, device, args):
    """Each rank keeps 1/N of the layers in a block; embeddings, norms and the head stay whole on every rank."""
    blocks = model.blocks
    # with blocks instead: blocks = blocks_of(model, needed_by="tensor parallelism")
    blocks = [block.to(device) for block in blocks]
    # with precision instead: blocks = [placed(block, device, args) for block in blocks]
    if args.sequence_parallel:
        split_sequence(blocks, mesh["tensor"])
    else:
        split(blocks, model, mesh["tensor"])
    return model.to(device)
    # with precision instead: return placed(model, device, args)


def split_sequence(blocks, tensor):
    """TENSOR_PLAN for activations that are sharded along axis 1 of (batch, time, width)."""
    sequence = Shard(1)
    plan = {name: ColwiseParallel(input_layouts=sequence) if style == "colwise"
            else RowwiseParallel(output_layouts=sequence) for name, style in TENSOR_PLAN.items()}  # fmt: skip
    plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
    for block in blocks:
        if missing := [name for name in [*plan, "head_width"] if not hasattr(block, name)]:
            names = f"{', '.join(plan)}; {type(block).__name__} has no {', '.join(missing)}"
            raise SystemExit(f"--sequence-parallel needs in each block {names}")
        if (heads := block.out.in_features // block.head_width) % tensor.size():
            raise SystemExit(f"{heads} heads cannot be split across {tensor.size()} tensor ranks")
        parallelize_module(block, tensor, plan)
    blocks[0].register_forward_pre_hook(lambda block, inputs: check_sequence(inputs[0], tensor.size()))
    entry = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=sequence, use_local_output=True)
    parallelize_module(blocks[0], tensor, entry)
    parallelize_module(
        blocks[-1], tensor, PrepareModuleOutput(output_layouts=sequence, desired_output_layouts=Replicate())
    )


def check_sequence(x, ranks):
    if x.shape[1] % ranks:
        raise SystemExit(f"--sequence-parallel: {x.shape[1]} positions cannot be split across {ranks} tensor ranks")


def make_optimizer(model, mesh, args):
    optimizer = optimizer_of(model.parameters(), args)
    for group in optimizer.param_groups:  # torch cannot update whole and split parameters together
        group["foreach"] = False
    optimizer.register_step_pre_hook(sum_gradients)
    return optimizer


def sum_gradients(optimizer, args, kwargs):
    """Sum the norms' partial gradients once: otherwise AdamW does it three times, wherever it reads one."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)

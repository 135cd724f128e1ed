"""Rules about names that torch has replaced, according to the source of torch 2.13. Each successor exists in torch 2.8,
the oldest version that labkit supports; names whose successors are newer are not reported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.nodes import Placed, keyword, last_part
from labkit.checking.syntax.tree import Tree

FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
CHECKPOINT = "torch.distributed.checkpoint"
REPLACED = {
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler('cuda')",
    "torch.cuda.amp.autocast": "torch.autocast('cuda')",
    "torch.cuda.amp.custom_fwd": "torch.amp.custom_fwd(device_type='cuda')",
    "torch.cuda.amp.custom_bwd": "torch.amp.custom_bwd(device_type='cuda')",
    "torch.cpu.amp.GradScaler": "torch.amp.GradScaler('cpu')",
    "torch.cpu.amp.autocast": "torch.autocast('cpu')",
    "torch.nn.utils.clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "torch.nn.parallel.DistributedDataParallelCPU": "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.reduce_op": "torch.distributed.ReduceOp",
    "torch.distributed._tensor": "torch.distributed.tensor",
    "torch.distributed._composable.fsdp": "torch.distributed.fsdp",
    "torch.distributed.pipeline.sync": "torch.distributed.pipelining",
    f"{CHECKPOINT}.save_state_dict": f"{CHECKPOINT}.save",
    f"{CHECKPOINT}.load_state_dict": f"{CHECKPOINT}.load",
    f"{FSDP}.state_dict_type": f"get_model_state_dict and set_model_state_dict of {CHECKPOINT}.state_dict",
    f"{FSDP}.set_state_dict_type": f"get_model_state_dict and set_model_state_dict of {CHECKPOINT}.state_dict",
    f"{FSDP}.full_optim_state_dict": f"get_optimizer_state_dict of {CHECKPOINT}.state_dict",
    f"{FSDP}.sharded_optim_state_dict": f"get_optimizer_state_dict of {CHECKPOINT}.state_dict",
    f"{FSDP}.shard_full_optim_state_dict": f"set_optimizer_state_dict of {CHECKPOINT}.state_dict",
    f"{FSDP}.flatten_sharded_optim_state_dict": f"set_optimizer_state_dict of {CHECKPOINT}.state_dict",
    f"{FSDP}.scatter_full_optim_state_dict": f"set_optimizer_state_dict of {CHECKPOINT}.state_dict",
    "torch.distributed.fsdp.ShardingStrategy.NO_SHARD": "torch.nn.parallel.DistributedDataParallel",
}
# The modules that define these names.
HOMES = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.": "torch.distributed.fsdp.",
    "torch.distributed.fsdp.api.": "torch.distributed.fsdp.",
    "torch.cuda.amp.grad_scaler.": "torch.cuda.amp.",
    "torch.cuda.amp.autocast_mode.": "torch.cuda.amp.",
    "torch.distributed.checkpoint.state_dict_saver.": f"{CHECKPOINT}.",
    "torch.distributed.checkpoint.state_dict_loader.": f"{CHECKPOINT}.",
}


@rule(
    "LK033 outdated",
    why="torch has deprecated, moved or already removed it (torch.distributed.pipeline).",
    fix="Use the successor named in the message.",
    misses="names that torch replaced after 2.8 (all_gather_into_tensor, broadcast_buffers), because supported older "
    "versions lack their successors.",
)
def replaced(tree: Tree) -> Mistakes:
    uses: dict[str, tuple[Placed, list[int]]] = {}
    for name, node in ((name, node) for name, node in _names(tree) if name.startswith("torch.")):
        for old, new in HOMES.items():
            name = name.replace(old, new)
        known = next((old for old in REPLACED if name == old or name.startswith(f"{old}.")), None)
        if known and not _is_fallback(tree, node):
            uses.setdefault(known, (node, []))[1].append(node.lineno)
    for old, (node, lines) in uses.items():
        again = sorted({line for line in lines if line != node.lineno})
        also = f" (also {', '.join(map(tree.location, again))})" if again else ""
        yield node, f"{old} is replaced by {REPLACED[old]}{also}"


def _names(tree: Tree) -> Iterator[tuple[str, Placed]]:
    """Every dotted name that is imported or used, at full length."""
    for source in tree.nodes[ast.ImportFrom]:
        yield from ((f"{source.module}.{alias.name}", source) for alias in source.names if not source.level)
    for module in tree.nodes[ast.Import]:
        yield from ((alias.name, module) for alias in module.names)
    for node in tree.nodes[ast.Attribute]:
        if not isinstance(tree.parents[node], ast.Attribute):
            yield tree.dotted(node), node


def _is_fallback(tree: Tree, node: ast.AST) -> bool:
    """Whether the name is a fallback for an older torch."""
    tried = any(tree.enclosing(node, ast.Try))
    return tried or any("version" in ast.unparse(b.test).lower() for b, _ in tree.branches_of(node))


@rule(
    "LK034 outdated",
    why="torch.distributed.launch, which passed --local_rank, is deprecated; torchrun does not pass it, so the option "
    "keeps its default on every rank.",
    fix="Use local_rank = int(os.environ['LOCAL_RANK']).",
    misses="options defined in another file.",
)
def local_rank_argument(tree: Tree) -> Mistakes:
    if tree.is_managed or "LOCAL_RANK" in tree.strings or not tree.joins:
        return
    for call in tree.method_calls("add_argument"):
        named = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if {"--local_rank", "--local-rank"} & set(named):
            yield call, "torchrun does not pass --local_rank"


@rule(
    "LK035 outdated",
    why="torch warns if use_reentrant is missing and will raise an error in the future. Its default, the old "
    "implementation, computes no gradients if no input requires one, and DDP supports it with static_graph=True only.",
    fix="Use checkpoint(function, *inputs, use_reentrant=False).",
    misses="checkpoint_wrapper, which already uses the new implementation.",
)
def checkpoint_reentrant(tree: Tree) -> Mistakes:
    for call in tree.calls:
        name = tree.called(call)
        if not name.startswith("torch.utils.checkpoint.checkpoint") or any(k.arg is None for k in call.keywords):
            continue
        if last_part(name) in ("checkpoint", "checkpoint_sequential") and not keyword(call, "use_reentrant"):
            yield call, "use_reentrant is missing"

"""Rules about names that torch has replaced. Each entry was read in the source of torch 2.13, and each successor is
in torch 2.8, the oldest that labkit runs on: what has a successor only in newer ones is not reported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.register import Mistakes, rule
from labkit.checking.syntax.nodes import Placed, keyword
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
# The same under the name of the module where it is written.
HOMES = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.": "torch.distributed.fsdp.",
    "torch.distributed.fsdp.api.": "torch.distributed.fsdp.",
    "torch.cuda.amp.grad_scaler.": "torch.cuda.amp.",
    "torch.cuda.amp.autocast_mode.": "torch.cuda.amp.",
    "torch.distributed.checkpoint.state_dict_saver.": f"{CHECKPOINT}.",
    "torch.distributed.checkpoint.state_dict_loader.": f"{CHECKPOINT}.",
}


@rule(
    "replaced",
    "outdated",
    why="torch warns that it goes away, has moved it, or has removed it already (torch.distributed.pipeline).",
    fix="Use the successor that the message names.",
    misses="names that torch replaced after 2.8 (all_gather_into_tensor, broadcast_buffers): their successors are "
    "missing in the older versions that still run.",
)
def replaced(tree: Tree) -> Mistakes:
    seen: dict[str, tuple[Placed, list[int]]] = {}
    for name, node in _names(tree):
        for old, new in HOMES.items():
            name = name.replace(old, new)
        known = next((old for old in REPLACED if name == old or name.startswith(f"{old}.")), None)
        if known and not _is_fallback(tree, node):
            seen.setdefault(known, (node, []))[1].append(node.lineno)
    for old, (node, lines) in seen.items():
        again = sorted({line for line in lines if line != node.lineno})
        also = f" (also {', '.join(map(tree.told, again))})" if again else ""
        yield node, f"{old} is replaced by {REPLACED[old]}{also}"


def _names(tree: Tree) -> Iterator[tuple[str, Placed]]:
    """Every dotted name that is imported or used, in the order of the text, each at its longest."""
    for source in tree.nodes[ast.ImportFrom]:
        yield from ((f"{source.module}.{alias.name}", source) for alias in source.names if not source.level)
    for module in tree.nodes[ast.Import]:
        yield from ((alias.name, module) for alias in module.names)
    for node in tree.nodes[ast.Attribute]:
        if not isinstance(tree.parents[node], ast.Attribute):
            yield tree.dotted(node), node


def _is_fallback(tree: Tree, node: ast.AST) -> bool:
    """For an older torch, beside the new name."""
    tried = any(isinstance(a, ast.Try) for a in tree.ancestors(node))
    return tried or any("version" in ast.unparse(b.test).lower() for b, _ in tree.branches_of(node))


@rule(
    "local-rank-argument",
    "outdated",
    why="torch.distributed.launch, which passed --local_rank, is deprecated; torchrun passes nothing, so the option "
    "keeps its default on every rank.",
    fix="local_rank = int(os.environ['LOCAL_RANK']).",
    misses="options that another file defines.",
)
def local_rank_argument(tree: Tree) -> Mistakes:
    if tree.is_managed or "LOCAL_RANK" in tree.strings or not tree.joins:
        return
    for call in tree.method_calls("add_argument"):
        named = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if {"--local_rank", "--local-rank"} & set(named):
            yield call, "torchrun does not pass --local_rank"


@rule(
    "checkpoint-reentrant",
    "outdated",
    why="torch warns when use_reentrant is not said, and announces an error. Until then it takes the old way: that "
    "computes no gradients when no input needs one, and DDP bears it with static_graph=True only.",
    fix="checkpoint(function, *inputs, use_reentrant=False).",
    misses="checkpoint_wrapper, which has chosen the new way already.",
)
def checkpoint_reentrant(tree: Tree) -> Mistakes:
    for call in tree.calls:
        name = tree.names_of_calls[call]
        if not name.startswith("torch.utils.checkpoint.checkpoint") or any(k.arg is None for k in call.keywords):
            continue
        if name.rsplit(".", 1)[-1] in ("checkpoint", "checkpoint_sequential") and not keyword(call, "use_reentrant"):
            yield call, "use_reentrant is not said"

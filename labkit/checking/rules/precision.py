"""Rules about numbers of 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.rules.numerics import ALONE
from labkit.checking.syntax.models import optimizers
from labkit.checking.syntax.nodes import argument_at, has_stars, keyword, last_part, spelled
from labkit.checking.syntax.tree import Tree

FP16 = ("torch.float16", "torch.half")


@rule(
    "LK026 wrong",
    why="Small gradients underflow to zero in fp16. Without a scaler they are lost silently, and training stalls.",
    fix="scaler = torch.amp.GradScaler('cuda') (FSDP1: torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler); "
    "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(). Or use bf16, if the GPU supports it.",
    misses="a precision set by an option; a scaler in another file.",
)
def unscaled_fp16(tree: Tree) -> Mistakes:
    if tree.is_managed or any("scale" in word.lower() for word in tree.words) or not any(tree.method_calls("backward")):
        return
    for call in tree.torch_calls("autocast", "MixedPrecision", "MixedPrecisionPolicy"):
        if _computes_in_fp16(tree, call):
            yield call, "fp16 gradients, but nothing scales the loss"
    trained = {name for _, name in optimizers(tree)}
    for call in tree.method_calls("half"):
        if spelled(call.func.value) in trained:
            yield call, "parameters and gradients in fp16, but nothing scales the loss"


def _computes_in_fp16(tree: Tree, call: ast.Call) -> bool:
    name = tree.called(call)
    if keyword(call, "enabled") is not None or has_stars(call):
        return False
    dtype = keyword(call, "dtype") or keyword(call, "param_dtype")
    if not name.endswith("autocast"):
        return tree.value(dtype) in FP16
    device = argument_at(call, 0, "device_type")
    on_cuda = name.startswith("torch.cuda.") or tree.value(device) == "cuda"
    if dtype is None and len(call.args) > 1:
        dtype = call.args[1]
    return on_cuda if dtype is None else tree.value(dtype) in FP16


@rule(
    "LK028 wrong",
    why="Under FSDP1, torch.amp.GradScaler looks for inf and nan in this rank's shards only: a rank that finds one "
    "skips the step while the others take it, and from then on they train different models.",
    fix="Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which combines all ranks.",
    misses="a scaler or a model in another file.",
)
def scaler_of_shards(tree: Tree) -> Mistakes:
    if {wrap.strategy for wrap in tree.wraps} != {"fsdp1"} or tree.words & {"ShardedGradScaler", *ALONE}:
        return
    for call in tree.torch_calls("GradScaler"):
        if keyword(call, "enabled") is None:
            yield call, "this scaler detects overflows only in one rank's shards"


# bf16 has 8 bits of significand: a sum is rounded back to a weight w by a change of less than |w| / 2**9. Adam changes
# a weight by the learning rate at most, more or less; a typical weight of a pretrained layer is 0.02.
TYPICAL_WEIGHT = 0.02
LOST_BELOW = TYPICAL_WEIGHT / 2**9
BF16 = "torch.bfloat16"
KEEPS = re.compile(r"master|stochastic|kahan|lora|peft|adapter|float32|fp32|autocast|mixed|OneCycleLR|CyclicLR", re.I)


@rule(
    "LK073 wrong",
    why="A bf16 number has 8 significant bits: what changes a weight by less than 1/512 of its size is rounded away. "
    "Adam changes each weight by about the learning rate, so that at 2e-5 all weights above 0.01 stay as they are.",
    fix="Keep the weights in float32 and compute in bf16: torch.autocast(device, torch.bfloat16), or "
    "MixedPrecisionPolicy(param_dtype=torch.bfloat16) with fully_shard; or use stochastic rounding.",
    misses="learning rates that come from elsewhere; SGD, whose steps depend on the gradients; "
    f"learning rates above {LOST_BELOW:.1e}, at which the larger weights stay as they are.",
)
def bf16_updates_lost(tree: Tree) -> Mistakes:
    if "bfloat16" not in tree.words or tree.is_managed or not any(tree.method_calls("backward")):
        return
    if any(map(KEEPS.search, _used(tree))):
        return
    if any(spelled(call.func.value) for call in tree.method_calls("float")):
        return  # possibly of the parameters
    everything = any(tree.value(next(iter(c.args), None)) == BF16 for c in tree.torch_calls("set_default_dtype"))
    models = set(_bf16_models(tree))
    for optimizer, name in optimizers(tree):
        sources = {name, *(spelled(wrap.source) for wrap in tree.wraps if name in wrap.names)}
        rate = argument_at(optimizer, 1, "lr")
        value = tree.default(rate)
        is_adam = last_part(tree.called(optimizer)) in ("Adam", "AdamW")
        if is_adam and (everything or models & sources) and isinstance(value, float) and 0 < value <= LOST_BELOW:
            by_default = "" if tree.value(rate) == value else " by default"
            yield optimizer, f"with a learning rate of {value:g}{by_default}, most bf16 weights are never changed"


def _used(tree: Tree) -> Iterator[str]:
    """The names in the code, without those that are only imported."""
    yield from (node.id for node in tree.nodes[ast.Name])
    yield from (node.attr for node in tree.nodes[ast.Attribute])
    yield from (node.arg for node in tree.nodes[ast.keyword] if node.arg)


def _bf16_models(tree: Tree) -> Iterator[str]:
    """The names of models whose weights are bf16."""
    for call in tree.calls:
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        kept = [*call.args, *(k.value for k in call.keywords if k.arg in ("dtype", "torch_dtype"))]
        is_cast = method == "bfloat16" or (method in ("to", "from_pretrained") and BF16 in map(tree.value, kept))
        if not is_cast:
            continue
        node: ast.AST = call
        while isinstance(tree.parents.get(node), ast.Call | ast.Attribute) and not isinstance(node, ast.stmt):
            node = tree.parents[node]  # DDP(net.to(torch.bfloat16)), net.to(…).train()
        yield from map(spelled, getattr(tree.parents.get(node), "targets", []))
        if isinstance(call.func, ast.Attribute) and isinstance(tree.parents[call], ast.Expr):
            yield spelled(call.func.value)

"""Rules about time wasted in every step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import behind
from labkit.checking.syntax.models import backwards, steps_in, without_gradients
from labkit.checking.syntax.nodes import keyword, owner_of, spelled
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.ways import is_only_about_rank


@rule(
    "LK036 slow",
    why=".item() waits until the GPU has finished all its work: its queue runs empty in every step, and input and "
    "communication no longer overlap with computation.",
    fix="Sum tensors (total += loss.detach()) and call .item() every N steps or after the epoch.",
    misses="float(loss), print(loss), .cpu() and .tolist(), which also wait; functions that the step calls.",
)
def item_every_step(tree: Tree) -> Mistakes:
    if not tree.is_distributed or tree.is_managed or not tree.is_on_gpu:
        return
    each_step = [*tree.method_calls("backward"), *steps_in(tree, tree.module)]
    stepping = {loop for call in each_step for loop in tree.loops_of(call)[:1]}  # not loops over epochs
    reported = set()
    for call in tree.method_calls("item"):
        loops = tree.loops_of(call)
        if call.args or not loops or loops[0] in reported or loops[0] not in stepping:
            continue
        if all(is_only_about_rank(tree, branch.test) for branch, _ in tree.branches_of(call, loops[0])):
            reported.add(loops[0])
            yield call, "every step waits for the GPU here"


@rule(
    "LK038 slow",
    why="DataParallel is one process with a thread per GPU: it copies the model to every GPU in every step and gathers "
    "all outputs on the first, and the GIL lets only one thread run at a time. torch advises against it.",
    fix="Use DistributedDataParallel, one process per GPU, started with torchrun; it is faster even on one machine.",
    misses="DataParallel as an alternative to DDP, which is a choice, or in a file that does not train.",
)
def data_parallel(tree: Tree) -> Mistakes:
    if "backward" not in tree.words and not tree.is_fragment:
        return
    for call in tree.torch_calls("DataParallel"):
        beside = bool(tree.wraps_of("ddp"))
        if not (beside and (tree.branches_of(call) or isinstance(tree.parents[call], ast.IfExp))):
            yield call, "nn.DataParallel is one process for all GPUs"


@rule(
    "LK039 slow",
    why="A T4 (compute capability 7.5) has no bf16 units: torch emulates it, slower than fp32.",
    fix="Use fp16 with a GradScaler, or bf16 on an A100 (8.0) or newer. Check with "
    "torch.cuda.is_bf16_supported(including_emulation=False).",
    misses="scripts that do not mention the GPU; a Kaggle notebook has it in its settings.",
)
def bf16_on_t4(tree: Tree) -> Mistakes:
    text = f"{tree.text} {tree.says}"
    if "T4" not in text or not re.search(r"\bT4\b|nvidiaTeslaT4|T4x2", text):
        return
    if tree.words & {"is_bf16_supported", "get_device_capability", "float16", "half"}:
        return  # the script checks, or has an alternative
    for node in tree.nodes[ast.Attribute]:
        parent = tree.parents[node]
        casts = node.attr == "bfloat16" and isinstance(parent, ast.Call) and parent.func is node
        if casts or tree.dotted(node) == "torch.bfloat16":
            yield node, "this script mentions a T4, which does not support bf16"
            return
    for call in tree.calls:  # TrainingArguments(bf16=True), Accelerator(mixed_precision="bf16")
        chosen = (keyword(call, "mixed_precision"), keyword(call, "fsdp_mixed_precision"))
        if tree.is_true(keyword(call, "bf16")) or any(tree.value(c) == "bf16" for c in chosen):
            yield call, "this script mentions a T4, which does not support bf16"
            return


@rule(
    "LK074 slow",
    why="A loss refers to the graph of operations that computed it. Summed up or kept in a list as it is, it keeps the "
    "graphs of all steps, and memory grows with every one.",
    fix="Keep loss.detach(), which does not wait for the GPU, or loss.item() now and then.",
    misses="other tensors than the one on which backward() is called.",
)
def loss_keeps_graph(tree: Tree) -> Mistakes:
    for backward, loss in backwards(tree):
        loop, names = tree.loop_of(backward), tree.spelled_in(loss)
        if loop is None or without_gradients(tree, backward):
            continue
        for name in sorted(names):
            for node, keeper in _kept(tree, loop, name):
                if keeper not in names and not _is_cut(tree, loop, name) and not _is_reset(tree, loop, keeper):
                    yield node, f"`{keeper}` keeps the graph of every step"


def _kept(tree: Tree, loop: ast.AST, loss: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """`total += loss` and `losses.append(loss)` in a loop, with the name of what keeps the loss."""
    for node in tree.nodes[ast.AugAssign]:
        value = node.value.left if isinstance(node.value, ast.BinOp) else node.value
        if isinstance(node.op, ast.Add) and spelled(value) == loss and tree.loop_of(node) is loop:
            yield node, spelled(node.target)
    for call in tree.method_calls("append", within=loop):
        if call.args and spelled(call.args[0]) == loss and tree.loop_of(call) is loop:
            yield call, spelled(call.func.value)


def _is_cut(tree: Tree, loop: ast.AST, loss: str) -> bool:
    """Whether the name of a loss stands for a number, or a tensor without a graph, somewhere in a loop."""
    values = [value for name, value, node in tree.assigns if name == loss and tree.is_in(node, loop)]
    calls = [part for value in values for part in tree.walk(value) if isinstance(part, ast.Attribute)]
    return any(part.attr in ("item", "detach", "data", "numpy", "tolist") for part in calls) or any(
        owner_of(call) == loss for call in tree.method_calls("detach_", within=loop)
    )


def _is_reset(tree: Tree, loop: ast.AST, keeper: str) -> bool:
    """Whether a loop itself empties what keeps the losses, or computes gradients from it."""
    stored = any(name == keeper and tree.is_in(node, loop) for name, _, node in tree.assigns)
    cleared = any(owner_of(call) == keeper for call in tree.method_calls("clear", "pop", "popleft", within=loop))
    used = any(spelled(part) == keeper for _, loss in backwards(tree) for part in behind(tree, loss))
    return not keeper or stored or cleared or used or "deque" in tree.words

"""Rules about models of transformers, peft and bitsandbytes in distributed scripts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.models import TOKEN_MODEL
from labkit.checking.syntax.nodes import (
    Placed,
    argument_at,
    entries,
    is_method_call,
    keyword,
    last_part,
    owner_of,
    spelled,
)
from labkit.checking.syntax.tree import Tree

SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")
ALTERNATIVES = re.compile(
    r"distributed|initialized|world_size|ddp|fsdp|rank|multi|num_gpus|n_gpu|device", re.IGNORECASE
)


@rule(
    "LK016 wrong",
    why="device_map='auto' spreads the model over all GPUs that a process sees. Under torchrun every rank does so: "
    "each GPU holds layers of every copy, and runs out of memory or waits for the others.",
    fix="Use device_map={'': local_rank}, or omit device_map and move or shard the model yourself.",
    misses="a device map passed as a variable with several values; scripts that only a launcher makes distributed; "
    "files of tests, of which only some join a group.",
)
def device_map_under_torchrun(tree: Tree) -> Mistakes:
    if tree.is_a_test or not (tree.is_distributed or _needs_torchrun(tree)):
        return
    for call in tree.method_calls("from_pretrained"):
        value = tree.value(keyword(call, "device_map"))
        if value not in SPREADS:
            continue
        if not any(ALTERNATIVES.search(ast.unparse(branch.test)) for branch, _ in tree.branches_of(call)):
            yield call, f"every rank spreads the model over all GPUs (device_map={value!r})"


def _needs_torchrun(tree: Tree) -> bool:
    """`os.environ["LOCAL_RANK"]`, which fails without torchrun."""
    reads = [node for name, node in tree.environment if name == "LOCAL_RANK" and isinstance(node.ctx, ast.Load)]
    return any(not tree.branches_of(node) and not isinstance(tree.parents[node], ast.IfExp) for node in reads)


@rule(
    "LK017 wrong",
    why="On a GPU fully_shard gathers 16-bit values by way of float32, which does not keep the bits of NaN. 4-bit "
    "weights that are packed into them have such bits by chance: the layers compute wrong outputs without any error "
    "(bitsandbytes #1945).",
    fix="Keep the storage uint8, bitsandbytes' default, which is gathered byte by byte; or use FSDP1 or DDP.",
    misses="a model quantized in another file.",
)
def four_bit_under_fully_shard(tree: Tree) -> Mistakes:
    if "fsdp2" not in tree.strategies or tree.words & {"ignored_params"} or "ddp" in tree.strategies:
        return
    for call in tree.calls:
        storage = keyword(call, "bnb_4bit_quant_storage") or keyword(call, "quant_storage")
        if str(tree.value(storage)).rpartition(".")[2] in ("bfloat16", "float16", "half"):
            yield call, "fully_shard does not keep 4-bit weights that are stored in 16 bits"


@rule(
    "LK018 wrong",
    why="Causal language models of transformers shift the labels themselves. If the script has shifted them already, "
    "the model learns to predict the token after the next.",
    fix="Pass labels=input_ids, with -100 where no loss is wanted, and the same slice of both.",
    misses="labels shifted in the data set, a collator or another function.",
)
def labels_shifted_twice(tree: Tree) -> Mistakes:
    if not any(TOKEN_MODEL.search(word) and not word.endswith("Seq2SeqLM") for word in tree.words):
        return
    for call in tree.calls:
        labels, inputs = keyword(call, "labels"), argument_at(call, 0, "input_ids")
        if labels is None or inputs is None or not spelled(call.func).lower().endswith(("model", "module", "lm")):
            continue
        if _is_sliced(tree, labels, "1:") and _is_sliced(tree, inputs, ":-1"):
            yield call, "these labels are shifted, and the model shifts them again"


def _is_sliced(tree: Tree, node: ast.expr, by: str) -> bool:
    """Whether an expression, or each value of its name, is `x[:, by]`."""
    if isinstance(node, ast.Name):
        values = tree.values(node)
        is_known = bool(values) and not any(isinstance(value, ast.Name) for value in values)
        return is_known and all(_is_sliced(tree, value, by) for value in values)
    while is_method_call(node):
        if node.func.attr not in ("contiguous", "clone", "to", "cuda", "detach", "long"):
            return False
        node = node.func.value
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return False
    return ast.unparse(node.slice.elts[-1]) == by


@rule(
    "LK020 slow",
    why="The state_dict of a peft model contains the frozen base. Saved in a loop, each checkpoint writes gigabytes "
    "that never change, where the adapter has megabytes.",
    fix="Use model.save_pretrained(folder), or torch.save(get_peft_model_state_dict(model), path).",
    misses="a state filtered or saved in another function; a base that is trained too.",
)
def frozen_base_in_checkpoints(tree: Tree) -> Mistakes:
    if "get_peft_model_state_dict" in tree.words:
        return
    adapted = {target for target, value, _ in tree.assigns if last_part(tree.called(value)) == "get_peft_model"}
    adapted |= {name for wrap in tree.wraps if spelled(wrap.source) in adapted for name in wrap.names}
    for call in tree.calls_to("torch.save"):
        values = tree.values(call.args[0]) if call.args and tree.loops_of(call) else []
        saved = [part for value in values for part in (value.values if isinstance(value, ast.Dict) else [value])]
        states = [owner_of(part) for part in saved if is_method_call(part, "state_dict")]
        if any(name.removesuffix(".module") in adapted for name in states):
            yield call, "the frozen base is written with every checkpoint"


@rule(
    "LK021 wrong",
    why="Reentrant checkpointing runs a backward pass within the backward pass. With find_unused_parameters=True, DDP "
    "then sees a parameter ready twice, and raises an error.",
    fix="Use use_reentrant=False (in transformers, gradient_checkpointing_kwargs={'use_reentrant': False}), or leave "
    "out find_unused_parameters=True.",
    misses="use_reentrant left out: its default was True in transformers 4 and is False in 5.",
)
def reentrant_checkpointing_under_ddp(tree: Tree) -> Mistakes:
    ddp = [wrap.call for wrap in tree.wraps_of("ddp")]
    is_static = any(keyword(call, "static_graph") is not None for call in ddp)
    if is_static or not any(tree.is_true(keyword(call, "find_unused_parameters")) for call in ddp):
        return
    for node in _reentrant(tree):
        yield node, "reentrant checkpointing, but DDP looks for unused parameters"


def _reentrant(tree: Tree) -> Iterator[Placed]:
    for call in tree.calls:
        name = tree.called(call)
        if name == "torch.utils.checkpoint.checkpoint" and tree.is_true(keyword(call, "use_reentrant")):
            yield call
        options = keyword(call, "gradient_checkpointing_kwargs") or keyword(call, "activation_checkpointing_kwargs")
        for key, value in entries(options) if isinstance(options, ast.Dict) else ():
            if tree.value(key) == "use_reentrant" and tree.is_true(value):
                yield call

"""Rules about when a model is wrapped and how it is used afterwards."""

from __future__ import annotations

import ast

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import surely_before
from labkit.checking.syntax.models import averages_by_hand, backwards, moves_to_device, optimizers
from labkit.checking.syntax.nodes import MethodCall, has_stars, keyword, owner_of, position, spelled
from labkit.checking.syntax.tree import Tree, Wrap


@rule(
    "LK044 slow",
    why="The whole model is moved to every GPU before it is sharded, so each GPU needs the memory that sharding should "
    "save; a model that does not fit on one GPU runs out of memory here.",
    fix="Keep the model on the CPU, or build it under torch.device('meta'): FSDP(model, device_id=…) and "
    "fully_shard(model) move the shards only. With meta, call model.to_empty(device=…) and initialize after wrapping.",
    misses="a model moved in another function than the one that wraps it; models small enough for it not to matter.",
)
def moved_before_sharding(tree: Tree) -> Mistakes:
    for wrap in tree.wraps_of("fsdp1", "fsdp2"):
        source, location, loop = wrap.source, tree.location(wrap.line), tree.loop_of(wrap.call)
        if isinstance(loop, ast.For) and spelled(loop.target) in tree.names_in(source):
            continue  # for unit in units: fully_shard(unit.to(device))
        if moves_to_device(tree, source):
            yield source, f"the whole model is moved to the GPU before {_named(wrap)} shards it"
        name = spelled(source)
        for call in tree.method_calls("to", "cuda") if name else ():
            is_moved = _moves(tree, call, name) and surely_before(tree, call, wrap.call)
            if is_moved and not _reassigned(tree, name, call, wrap) and not _first_wrapped(tree, wrap, call):
                yield call, f"the whole model is moved to the GPU before {_named(wrap)} shards it ({location})"


def _named(wrap: Wrap) -> str:
    return "fully_shard" if wrap.strategy == "fsdp2" else "FSDP"


def _moves(tree: Tree, call: MethodCall, name: str) -> bool:
    """`model.to(…)`, or `model = Model().to(…)`."""
    is_of_model = owner_of(call) == name or (name in tree.targets_of(call) and isinstance(call.func.value, ast.Call))
    return is_of_model and moves_to_device(tree, call)


def _reassigned(tree: Tree, name: str, since: ast.Call, wrap: Wrap) -> bool:
    """Whether the name refers to another model when it is wrapped."""
    for target, value, node in tree.assigns:
        between = position(since) < position(node) < position(wrap.call) and wrap.call is not value
        here = target == name and between and tree.function_of(node) is tree.function_of(wrap.call)
        if here and not any(spelled(part) == name for part in tree.walk(value)):
            return True
    return False


def _first_wrapped(tree: Tree, wrap: Wrap, call: ast.Call) -> bool:
    """Whether the model or its layers were sharded before it was moved."""
    others = (other for other in tree.wraps_of("fsdp1", "fsdp2") if other is not wrap)
    here = (other for other in others if tree.function_of(other.call) is tree.function_of(call))
    return any(position(other.call) < position(call) for other in here)


@rule(
    "LK045 wrong",
    why="FSDP replaces the model's parameters by shards. An optimizer built earlier holds the old parameters: it "
    "updates unused tensors or fails. DDP keeps the parameters, so the order does not matter there.",
    fix="Build the optimizer after FSDP(model) or fully_shard(model), from the wrapped model's parameters().",
    misses="an optimizer built in another function than the one that wraps the model.",
)
def optimizer_before_wrapping(tree: Tree) -> Mistakes:
    made = list(optimizers(tree))
    for call, name in made:
        wraps = [w for w in tree.wraps_of("fsdp1", "fsdp2") if spelled(w.source) == name]
        later = [w for w in wraps if surely_before(tree, call, w.call) and not _reassigned(tree, name, call, w)]
        if later and not any(position(other) > position(later[0].call) for other, _ in made):
            place = tree.location(later[0].line)
            yield call, f"this optimizer holds the parameters from before the model is sharded ({place})"


@rule(
    "LK046 slow",
    why="Parameters are gathered unit by unit. If the whole model is a single unit, all of them are gathered at once, "
    "so the peak includes the whole model, and communication does not overlap with computation.",
    fix="FSDP2: call fully_shard(block) for every block, then fully_shard(model). FSDP1: pass auto_wrap_policy, such "
    "as transformer_auto_wrap_policy with the class of the blocks.",
    misses="a size-based policy whose threshold no layer of the model reaches.",
)
def one_shard_unit(tree: Tree) -> Mistakes:
    sharded = tree.wraps_of("fsdp1", "fsdp2")
    if not sharded or tree.words & {"auto_wrap_policy", "auto_wrap", "enable_wrap", "apply", "parallelize_fn"}:
        return
    if any(tree.loops_of(w.call) or has_stars(w.call) for w in sharded):
        return
    for strategy in ("fsdp1", "fsdp2"):
        wraps = tree.wraps_of(strategy)
        if len(wraps) == 1 and not isinstance(wraps[0].source, ast.Call | ast.Attribute | ast.Subscript):
            yield wraps[0].call, "the whole model is one unit: its parameters are all gathered at once"


@rule(
    "LK047 wrong",
    why="fully_shard changes the model in place, so it has no .module (AttributeError). FSDP1 has one, but the wrapper "
    "gathers the parameters: code that bypasses it computes with shards or saves them.",
    fix="Use the model itself.",
    misses="a model that another file wraps.",
)
def module_of_sharded(tree: Tree) -> Mistakes:
    if any(target.endswith(".module") for target, _, _ in tree.assigns):
        return  # a class of the script defines one
    for node in tree.nodes[ast.Attribute]:
        if node.attr != "module":
            continue
        strategies = tree.wrapping(node.value)
        parent = tree.parents[node]
        if strategies == {"fsdp2"}:
            yield node, "a model sharded by fully_shard has no .module"
        elif strategies == {"fsdp1"} and _goes_round(parent, node):
            yield node, "this bypasses FSDP, which would gather the parameters"


@rule(
    "LK048 wrong",
    why="fully_shard copies a unit's gradients into one buffer for its reduce-scatter, which takes dense ones only: "
    "the first backward pass fails (Could not run 'fsdp::chunk_cat').",
    fix="Omit sparse=True, or use DDP on gloo: NCCL does not add up sparse gradients either.",
    misses="FSDP1; layers of another file.",
)
def sparse_gradients_sharded(tree: Tree) -> Mistakes:
    if tree.strategies == {"fsdp2"}:
        for call in tree.torch_calls("Embedding", "EmbeddingBag"):
            if tree.is_true(keyword(call, "sparse")):
                yield call, "fully_shard does not support the sparse gradients of this layer"


@rule(
    "LK049 wrong",
    why="FSDP frees the gathered parameters in each backward pass. The second pass, through the gradient that "
    "torch.autograd.grad computed, needs them again and fails (setStorage: … storage of size 0). FSDP1 with NO_SHARD "
    "and use_orig_params=True loses gradients instead.",
    fix="Use DDP or ZeRO-1.",
    misses="a gradient taken in another file or by torch.func; FSDP1 with NO_SHARD.",
)
def double_backward_sharded(tree: Tree) -> Mistakes:
    if tree.strategies and tree.strategies <= {"fsdp1", "fsdp2"} and "NO_SHARD" not in tree.words:
        name = "fully_shard" if "fsdp2" in tree.strategies else "FSDP"
        for call in tree.torch_calls("grad"):
            if tree.is_true(keyword(call, "create_graph")):
                yield call, f"{name} does not support a backward pass through a gradient"


def _goes_round(parent: ast.AST, node: ast.Attribute) -> bool:
    """`model.module(x)`, `model.module.state_dict()`."""
    if isinstance(parent, ast.Call):
        return parent.func is node
    return isinstance(parent, ast.Attribute) and parent.attr in ("forward", "state_dict", "load_state_dict")


@rule(
    "LK050 wrong",
    why="A model sharded by fully_shard has no no_sync() (AttributeError).",
    fix="Call model.set_requires_gradient_sync(last_micro_batch) before each forward pass.",
    misses="a model that another file wraps.",
)
def no_sync_of_fsdp2(tree: Tree) -> Mistakes:
    for call in tree.method_calls("no_sync"):
        if tree.wrapping(call.func.value) == {"fsdp2"}:
            yield call, "a model sharded by fully_shard has no no_sync()"


@rule(
    "LK082 wrong",
    why="fully_shard averages the gradients of the parameters that it shards. If it is called for the blocks only, "
    "those of the rest (embeddings, the last norm, the head) are trained by each rank for itself, and part.",
    fix="Call fully_shard(model) after fully_shard(block) for every block.",
    misses="models of which all parameters are in the blocks, or whose other gradients are averaged by hand.",
)
def root_not_sharded(tree: Tree) -> Mistakes:
    units = tree.wraps_of("fsdp2")
    heads = [loop for wrap in units for loop in tree.loops_of(wrap.call)[:1] if isinstance(loop, ast.For)]
    owners = {spelled(loop.iter.value) for loop in heads if isinstance(loop.iter, ast.Attribute)}
    inside = [wrap for wrap in units if any(spelled(wrap.source) == spelled(loop.target) for loop in heads)]
    if not units or len(owners) != 1 or len(inside) != len(units) or any(has_stars(wrap.call) for wrap in units):
        return
    loops = [loop for backward, _ in backwards(tree) for loop in tree.loops_of(backward)]
    trained = owners & {name for _, name in optimizers(tree)}
    if trained and loops and not any(averages_by_hand(tree, loop) for loop in loops) and "ddp" not in tree.strategies:
        yield units[0].call, f"nothing shards the rest of `{trained.pop()}`, which each rank trains for itself"


@rule(
    "LK083 wrong",
    why="Two optimizers have the parameters of one model, and none those of another that is wrapped for training: the "
    "second model never changes, and the first takes two kinds of steps.",
    fix="Give each optimizer the parameters of its own model.",
    misses="optimizers that another function makes.",
)
def optimizer_of_other_model(tree: Tree) -> Mistakes:
    made = list(optimizers(tree))
    names = [name for _, name in made]
    unused = [w for w in tree.wraps if w.strategy == "ddp" and w.names and not _is_optimized(tree, w)]
    for call, name in made:
        if unused and names.count(name) > 1 and call is not made[names.index(name)][0]:
            missing = f"no optimizer has those of `{unused[0].names[0]}`"
            yield call, f"this has the parameters of `{name}`, as another has; {missing}"


def _is_optimized(tree: Tree, wrap: Wrap) -> bool:
    """Whether the parameters of a wrapped model are mentioned anywhere, but to clear or count them."""
    names = wrap.all_names | tree.names_in(wrap.source) - {"nn", "torch"}
    calls = tree.method_calls("parameters", "named_parameters", "requires_grad_", "eval")
    return any(owner_of(call).split(".")[0] in names for call in calls)

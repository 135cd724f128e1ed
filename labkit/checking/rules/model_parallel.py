"""Rules about models, sequences and experts that are split over ranks."""

from __future__ import annotations

import ast
import re
import sys

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import surely_before
from labkit.checking.syntax.nodes import keyword, last_part, spelled
from labkit.checking.syntax.ranks import depends_on_rank
from labkit.checking.syntax.tree import Tree

POSITIONS = re.compile(
    r"freqs_cis|rotary|rope(_|$)|^pos(itions?)?(_ids|_emb\w*)?$|position_(ids|emb\w*)", re.IGNORECASE
)
PARTS = ("embed", "blocks", "unembed")  # of a model that labkit's pipeline divides
OF_TORCH = {"linear1", "linear2", "self_attn", "multihead_attn", "out_proj"}  # layers within torch.nn's own
ROUTER = re.compile(r"^self\.(\w*router|gate)$")


@rule(
    "LK040 wrong",
    why="context_parallel splits only the buffers that it is given. Each rank then has a part of the tokens, but "
    "takes the positions of the first part for them, without any error.",
    fix="context_parallel(mesh, buffers=[inputs, labels, model.freqs_cis], buffer_seq_dims=[1, 1, 0]): every tensor "
    "with a sequence axis, and position_ids if the model takes them.",
    misses="buffers in a variable; positions that a model in another file computes from the length of its input; "
    "sequences that the script splits itself.",
)
def positions_not_split(tree: Tree) -> Mistakes:
    if not any(POSITIONS.search(word) for word in tree.words):
        return
    for call in tree.torch_calls("context_parallel"):
        buffers = keyword(call, "buffers")
        if not isinstance(buffers, ast.List | ast.Tuple) or not buffers.elts:
            continue
        words = [last_part(spelled(node)) for buffer in buffers.elts for node in tree.walk(buffer)]
        if not any(isinstance(buffer, ast.Starred) for buffer in buffers.elts) and not any(
            map(POSITIONS.search, words)
        ):
            yield call, "the sequence is split, but not the model's positions"


@rule(
    "LK041 wrong",
    why="With experts on different ranks, all ranks must have the same router. If it is seeded by rank and not "
    "broadcast by DDP, each rank routes its tokens differently; averaged gradients do not make the routers equal "
    "again.",
    fix="Seed all ranks alike while the model is made; seed by rank afterwards, for dropout. Or broadcast all but the "
    "experts from rank 0.",
    misses="a router with another name than router or gate; a model made in another file or function; scripts "
    "that broadcast or load anything.",
)
def router_seeded_by_rank(tree: Tree) -> Mistakes:
    alike = any(word in tree.words for word in ("broadcast", "_broadcast_coalesced", "load_state_dict"))
    if alike or "ddp" in tree.strategies or not any(tree.torch_calls("all_to_all", "all_to_all_single")):
        return
    routed = _routed(tree)
    seeds = list(tree.torch_calls("manual_seed"))
    by_rank = {seed for seed in seeds if depends_on_rank(tree, *seed.args)}
    for made in (call for call in tree.calls if isinstance(call.func, ast.Name) and call.func.id in routed):
        before = [seed for seed in seeds if surely_before(tree, seed, made)]
        if before and before[-1] in by_rank:
            yield before[-1], f"the router of {spelled(made.func)} differs between ranks"
            return


@rule(
    "LK042 wrong",
    why="labkit's pipeline and hybrid form stages of a model's embed, blocks and unembed; its tensor_parallel splits "
    "the Linear layers that TENSOR_PLAN names; its context_parallel tells the layer positions where a rank's part of "
    "the sequence is. Without them, as in a recurrent model, the script exits at its start.",
    fix="Give the model these parts, write a TENSOR_PLAN for its own Linear layers, or use fsdp.",
    misses="models made by a library, in another file or by a function; layers that are named in a loop.",
)
def model_not_split(tree: Tree) -> Mistakes:
    model = tree.classes.get(next((spelled(value) for name, value, _ in tree.assigns if name == "Model"), "Model"))
    if model is None or [tree.dotted(base) for base in model.bases] != ["torch.nn.Module"] or _names_by_string(tree):
        return
    made = {node.name for node in model.body if isinstance(node, ast.FunctionDef)}
    made |= {name.removeprefix("self.") for name, value, _ in tree.assigns if tree.is_in(value, model)}
    if "check_model" in tree.functions:
        if missing := [part for part in PARTS if part not in made]:
            yield model, f"a pipeline needs embed, blocks and unembed: this model has no {', '.join(missing)}"
    elif "positions_of" in tree.functions:
        if missing := [name for name in _texts(tree, "POSITIONS") if name.split(".")[0] not in made]:
            yield model, f"context ranks need a layer that is called with positions: this model has no {missing[0]}"
    elif "split_layer" in tree.functions:
        layers = [name for name in _texts(tree, "TENSOR_PLAN") if re.fullmatch(r"[\w.]+", name)]  # without patterns
        if missing := [name for name in layers if name.split(".")[-1] not in tree.words | OF_TORCH]:
            yield model, f"this model has no {', '.join(missing)}, which TENSOR_PLAN splits"


def _texts(tree: Tree, name: str) -> list[str]:
    """The text, or the keys of the dictionary, that a name stands for."""
    values = [value for target, value, _ in tree.assigns if target == name]
    parts = [part for value in values for part in (value.keys if isinstance(value, ast.Dict) else [value])]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def _names_by_string(tree: Tree) -> bool:
    """Whether layers may have names that the text does not show: of a library, or set as strings."""
    is_hidden = {"add_module", "setattr", "ModuleDict"} & tree.words
    return bool(is_hidden or tree.packages - sys.stdlib_module_names - {"torch"})


@rule(
    "LK043 wrong",
    why="Under labkit's expert_parallel a rank has a part of the experts: a slice of parameters that are stacked by "
    "expert, and as many sizes. A list of modules is an error; a loop over all experts fails in the first step.",
    fix="One module named experts with stacked parameters, whose forward(rows, sizes) computes len(sizes) of them: for "
    "part, weight in zip(rows.split(sizes), self.weight).",
    misses="a number that forward gets or assigns; loops in functions that it calls; experts made in another file.",
)
def all_experts_on_a_rank(tree: Tree) -> Mistakes:
    if "on_this_rank" not in tree.functions:  # not a script of that strategy
        return
    for made in (value for value in tree.assigned_to_self("self.experts") if isinstance(value, ast.Call)):
        if last_part(tree.called(made)) in ("ModuleList", "ModuleDict"):
            yield made, f"{spelled(made.func)} is a list of modules, which expert_parallel cannot divide"
        for loop in _loops_of_forward(tree, spelled(made.func)):
            if isinstance(loop, ast.Call) and spelled(loop.func) == "range" and _is_fixed(tree, loop.args[-1]):
                yield loop, f"{ast.unparse(loop)} counts all experts of the model, but a rank has a part of them"


def _loops_of_forward(tree: Tree, name: str) -> list[ast.expr]:
    """What the loops in the forward of a class run over."""
    loops = [loop.iter for loop in tree.nodes[ast.For]] + [loop.iter for loop in tree.nodes[ast.comprehension]]
    methods = [method for method in tree.functions["forward"] if tree.parents[method] is tree.classes.get(name)]
    return [loop for loop in loops if tree.function_of(loop) in methods]


def _is_fixed(tree: Tree, count: ast.expr) -> bool:
    """Whether a count is a literal, an attribute of self or a name of the module: not what forward gets or assigns."""
    if isinstance(count, ast.Name):
        scope = tree.function_of(count)
        return not tree.parameter(count.id, count) and not any(
            target == count.id and tree.function_of(statement) is scope for target, _, statement in tree.assigns
        )
    return isinstance(count, ast.Constant) or (isinstance(count, ast.Attribute) and spelled(count).startswith("self."))


def _routed(tree: Tree) -> set[str]:
    """The classes with a router, and those that use them."""
    names = {name for name, node in tree.classes.items() if any(_has_router(part) for part in tree.walk(node))}
    while more := {
        name
        for name, node in tree.classes.items()
        if name not in names and any(isinstance(part, ast.Name) and part.id in names for part in tree.walk(node))
    }:
        names |= more
    return names


def _has_router(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and bool(ROUTER.match(spelled(node)))

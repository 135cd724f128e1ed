"""Rules about sequences and experts that are split over ranks."""

from __future__ import annotations

import ast
import re

from labkit.checking.register import Mistakes, rule
from labkit.checking.syntax.nodes import keyword, spelled
from labkit.checking.syntax.ranks import is_rank
from labkit.checking.syntax.tree import Tree

POSITIONS = re.compile(
    r"freqs_cis|rotary|rope(_|$)|^pos(itions?)?(_ids|_emb\w*)?$|position_(ids|emb\w*)", re.IGNORECASE
)
ROUTER = re.compile(r"^self\.(\w*router|gate)$")


@rule(
    "positions-not-split",
    "wrong",
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
        words = [spelled(node).rsplit(".", 1)[-1] for buffer in buffers.elts for node in ast.walk(buffer)]
        if not any(isinstance(buffer, ast.Starred) for buffer in buffers.elts) and not any(
            map(POSITIONS.search, words)
        ):
            yield call, "the sequence is split, but not the model's positions"


@rule(
    "router-seeded-by-rank",
    "wrong",
    why="With experts on different ranks, all ranks must have the same router. Seeded by rank before the model is "
    "made, and not broadcast by DDP, each rank sends its tokens to experts of its own choice; averaged gradients do "
    "not make the routers equal again.",
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
    by_rank = {seed for seed in seeds if any(is_rank(tree, node) for arg in seed.args for node in ast.walk(arg))}
    for made in (call for call in tree.calls if isinstance(call.func, ast.Name) and call.func.id in routed):
        before = [seed for seed in seeds if tree.surely_before(seed, made)]
        if before and before[-1] in by_rank:
            yield before[-1], f"the router of {spelled(made.func)} differs between ranks"
            return


def _routed(tree: Tree) -> set[str]:
    """The classes with a router, and those that use them."""
    names = {name for name, node in tree.classes.items() if any(_has_router(part) for part in ast.walk(node))}
    while more := {
        name
        for name, node in tree.classes.items()
        if name not in names and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))
    }:
        names |= more
    return names


def _has_router(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and bool(ROUTER.match(spelled(node)))

"""A script's syntax tree, with the models that it wraps and the libraries that it leaves things to."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

from labkit.checking.syntax.nodes import argument_at, is_main_guard, last_part, spelled
from labkit.checking.syntax.values import Valued

WRAPPERS = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp1", "fully_shard": "fsdp2"}
# These handle sampling, wrapping, saving and clean-up, so a script that omits them is not wrong.
FRAMEWORKS = {
    *("accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "horovod", "ray", "composer"),
    *("ignite", "fairscale", "colossalai", "megatron", "apex", "mmengine", "catalyst", "trl", "fastai", "torchtnt"),
}

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Around:
    """The strategies and the names of wrapped models in the rest of a fragment's document."""

    strategies: frozenset[str] = frozenset()
    wrapped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Wrap:
    """`model = DDP(net)`: the call, the strategy, `net`, and the names of the wrapped model."""

    call: ast.Call
    strategy: str
    source: ast.expr
    names: tuple[str, ...] = ()

    @property
    def line(self) -> int:
        return self.call.lineno

    @property
    def all_names(self) -> set[str]:
        """The names of the wrapped model and of the one within."""
        return {*self.names, spelled(self.source)} - {""}


class Tree(Valued):
    """What the rules look at. Raises SyntaxError or ValueError if the text is not Python."""

    around = Around()

    @cached_property
    def wraps(self) -> list[Wrap]:
        return [wrap for call in self.torch_calls(*WRAPPERS) for wrap in self._wraps(call)]

    def wraps_of(self, *strategies: str) -> list[Wrap]:
        return [wrap for wrap in self.wraps if wrap.strategy in strategies]

    def _wraps(self, call: ast.Call) -> Iterator[Wrap]:
        strategy = WRAPPERS[last_part(self.called(call))]
        source = argument_at(call, 0, "module")
        if source is None:
            return  # a decorator or a partial: the model is unknown
        names = self.targets_of(call)
        if strategy == "fsdp2" and (name := spelled(source)):  # in place
            names.append(name)
        yield Wrap(call, strategy, source, tuple(dict.fromkeys(names)))
        loop = self.loop_of(call) if strategy == "fsdp2" else None
        listed = loop.iter if isinstance(loop, ast.For) and spelled(loop.target) == spelled(source) else None
        if isinstance(listed, ast.List | ast.Tuple):  # for part in (*model.layers, model): fully_shard(part)
            yield from (Wrap(call, strategy, e, (e.id,)) for e in listed.elts if isinstance(e, ast.Name))

    @cached_property
    def strategies(self) -> frozenset[str]:
        """Those of ddp, fsdp1 and fsdp2 in use; in a fragment that wraps nothing, those of the rest of the document."""
        return frozenset(wrap.strategy for wrap in self.wraps) or self.around.strategies

    @cached_property
    def shards(self) -> frozenset[str]:
        return self.strategies & {"fsdp1", "fsdp2"}

    @cached_property
    def joins(self) -> list[ast.Call]:
        """Calls that join the process group."""
        return list(self.torch_calls("init_process_group", "init_device_mesh"))

    @cached_property
    def is_distributed(self) -> bool:
        return bool(self.joins or self.strategies) and "fake" not in self.strings  # a rehearsal on one process

    @cached_property
    def strings(self) -> set[str]:
        return {node.value for node in self.nodes[ast.Constant] if isinstance(node.value, str)}

    @cached_property
    def is_managed(self) -> bool:
        """Whether a framework handles what the script seems to omit, or its processes have roles (RPC)."""
        names = self.imports.values()
        trains = any(name.startswith("transformers.") and name.endswith("Trainer") for name in names)
        return trains or bool(self.packages & FRAMEWORKS) or any(n.startswith("torch.distributed.rpc") for n in names)

    @cached_property
    def has_main_guard(self) -> bool:
        """Whether the script has `if __name__ == "__main__":`."""
        return any(is_main_guard(node) for node in self.nodes[ast.If])

    @cached_property
    def is_a_test(self) -> bool:
        """Whether this is a test, which may be slow on purpose."""
        return bool(self.packages & {"pytest", "unittest"})

    @cached_property
    def is_on_gpu(self) -> bool:
        return bool(self.words & {"cuda", "accelerator", "xpu"}) or any(re.match(r"cuda|nccl", s) for s in self.strings)

    @cached_property
    def _wrapped(self) -> set[str]:
        return {name for wrap in self.wraps for name in wrap.names} | self.around.wrapped

    def wrapping(self, node: ast.AST | None) -> frozenset[str]:
        """The strategies that wrap the model in this expression, judged by its name: `model` after
        `model = DDP(model)`, even in a function with a parameter of that name."""
        name = spelled(node) if self._wrapped else ""
        if node is None or name not in self._wrapped:
            return frozenset()
        everywhere = [wrap for wrap in self.wraps if name in wrap.names]
        here = [wrap for wrap in everywhere if self.function_of(wrap.call) is self.function_of(node)]
        if not here and self.values_of(name, node) and not self.parameter(name, node) and "." not in name:
            scope = self.function_of(node)
            if any(t == name and self.function_of(s) is scope for t, _, s in self.assigns) and scope is not self.module:
                return frozenset()  # a local model
        if everywhere:
            return frozenset(wrap.strategy for wrap in here or everywhere)
        return self.around.strategies if name in self.around.wrapped and not self.wraps else frozenset()


@lru_cache(maxsize=1)
def tree_of(text: str) -> Tree:
    """The tree of a whole script, which a launch looks at twice. Raises as Tree does."""
    return Tree(text)


def kept(query: Callable[Concatenate[Tree, P], R]) -> Callable[Concatenate[Tree, P], R]:
    """Ask a query once for each tree and what else it gets; later it answers with what it found."""

    @wraps(query)
    def asked(tree: Tree, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (query, *args, *kwargs.values())
        if key not in tree.kept:
            tree.kept[key] = query(tree, *args, **kwargs)
        found: R = tree.kept[key]
        return found

    return asked

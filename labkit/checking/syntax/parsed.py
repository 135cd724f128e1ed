"""A script's text parsed once: names resolved to what was imported, where each node stands, what names are given."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Protocol, TypeVar

from labkit.checking.syntax.nodes import (
    Function,
    MethodCall,
    Placed,
    is_main_guard,
    is_method_call,
    parameters_of,
    position,
    spelled,
)

__all__ = ["Parsed"]

Told = Callable[[int], str]
N = TypeVar("N", bound=ast.AST)


class ByKind(Protocol):
    def __getitem__(self, kind: type[N], /) -> list[N]: ...


# What a fragment means by a name that nothing in it binds: articles leave the imports out.
USUAL = {
    "dist": "torch.distributed",
    "nn": "torch.nn",
    "optim": "torch.optim",
    "F": "torch.nn.functional",
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp.FullyShardedDataParallel",
    "fully_shard": "torch.distributed.fsdp.fully_shard",
    "ShardingStrategy": "torch.distributed.fsdp.ShardingStrategy",
    "DataLoader": "torch.utils.data.DataLoader",
    "DistributedSampler": "torch.utils.data.distributed.DistributedSampler",
    "init_process_group": "torch.distributed.init_process_group",
    "destroy_process_group": "torch.distributed.destroy_process_group",
}


class Parsed:
    """Raises SyntaxError or ValueError when the text is not Python."""

    def __init__(self, text: str, *, says: str = "", is_fragment: bool = False, told: Told = "line {}".format):
        self.text = text
        self.lines = text.split("\n")  # as ast counts them
        self.says = says  # what is told beside the code: a notebook's settings
        self.told = told  # a line of the text, as it is called in the file that it is from
        self.is_fragment = is_fragment  # a block of an article, a notebook's cells: not all of a program
        self.module = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}  # the function each node stands in
        self.calls: list[ast.Call] = []
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.assigns: list[tuple[str, ast.expr, ast.stmt]] = []  # target as text, value, statement
        self.imports: dict[str, tuple[str, ast.stmt]] = {}  # local name: what it stands for
        self.words: set[str] = set()  # every identifier, attribute and keyword
        self.bound: set[str] = set()
        nodes: dict[type[ast.AST], list[Any]] = defaultdict(list)
        self.nodes: ByKind = nodes
        self.kept: dict[str, Any] = {}  # answers that rules ask for again and again
        self._read()

    def _read(self) -> None:
        pending: list[ast.AST] = [self.module]
        while pending:  # not ast.walk: in the order of the text, and parents on the way
            node = pending.pop()
            self.nodes[type(node)].append(node)
            self._note(node)
            children = list(ast.iter_child_nodes(node))
            scope = node if isinstance(node, Function | ast.Lambda) else self._scopes.get(node, self.module)
            for child in children:
                self.parents[child] = node
                self._scopes[child] = scope
            pending.extend(reversed(children))
        self.calls = self.nodes[ast.Call]

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.words.add(node.id)
            if isinstance(node.ctx, ast.Store):
                self.bound.add(node.id)
        elif isinstance(node, ast.Attribute):
            self.words.add(node.attr)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            self.words.add(node.arg)
            if isinstance(node, ast.arg):
                self.bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions[node.name].append(node)
            self.bound.add(node.name)
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
            self.bound.add(node.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.words.update(alias.name.split("."))
                known = alias.name if alias.asname else alias.name.split(".")[0]
                self.imports[alias.asname or known] = (known, node)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            self.words.update(source.split("."))
            for alias in node.names:
                self.words.add(alias.name)
                self.imports[alias.asname or alias.name] = (f"{source}.{alias.name}", node)
        else:
            self._note_assignment(node)

    def _note_assignment(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs: Iterable[tuple[ast.expr, ast.expr]]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                elif isinstance(target, ast.Tuple):
                    pairs = ((part, node.value) for part in target.elts)
                else:
                    pairs = [(target, node.value)]
                self.assigns.extend((name, value, node) for part, value in pairs if (name := spelled(part)))
        elif isinstance(node, ast.AnnAssign) and node.value is not None and (name := spelled(node.target)):
            self.assigns.append((name, node.value, node))

    # names

    def dotted(self, node: ast.AST) -> str:
        """`dist.barrier` as "torch.distributed.barrier"; "" for what is no dotted name."""
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        base = self.imports[node.id][0] if node.id in self.imports else node.id
        if node.id not in self.imports and node.id not in self.bound:
            base = USUAL.get(node.id, node.id)
        return ".".join([base, *reversed(attributes)])

    @cached_property
    def names_of_calls(self) -> dict[ast.Call, str]:
        return {call: self.dotted(call.func) for call in self.calls}

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        """Of torch's functions by their last name, of methods by ".name"."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            if (name := self.names_of_calls[call]).startswith("torch."):
                found[name.rsplit(".", 1)[1]].append(call)
            if isinstance(call.func, ast.Attribute):
                found[f".{call.func.attr}"].append(call)
        return found

    def torch_calls(self, *names: str, within: ast.AST | None = None) -> Iterator[ast.Call]:
        """Calls of torch's own `names`, from whichever of its modules, in the order of the text."""
        return self._calls(names, within)

    def method_calls(self, *names: str, within: ast.AST | None = None) -> Iterator[MethodCall]:
        """Calls `anything.name(…)`, in the order of the text."""
        return filter(is_method_call, self._calls([f".{name}" for name in names], within))

    def _calls(self, names: Iterable[str], within: ast.AST | None) -> Iterator[ast.Call]:
        found = (call for name in names for call in self._calls_by_name.get(name, ()))
        return iter(sorted((call for call in found if self.is_in(call, within)), key=position))

    def is_in(self, node: ast.AST, within: ast.AST | None) -> bool:
        return within is None or within is node or within in self.ancestors(node)

    # places

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function a node stands in, or the module."""
        return self._scopes.get(node, self.module)

    def statement_of(self, node: ast.AST) -> ast.stmt | None:
        return next((a for a in (node, *self.ancestors(node)) if isinstance(a, ast.stmt)), None)

    def loops_of(self, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops a node is repeated by within its function, the innermost first."""
        loops = []
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, Function | ast.Lambda):
                break
            if isinstance(ancestor, ast.For | ast.AsyncFor | ast.While):
                loops.append(ancestor)
        return loops

    def branches_of(self, node: ast.AST) -> list[tuple[ast.If, bool]]:
        """The `if`s that decide within its function whether a node runs, and whether it is in the first branch."""
        found = []
        child = node
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, Function | ast.Lambda):
                break
            if isinstance(ancestor, ast.If) and child is not ancestor.test and not is_main_guard(ancestor):
                found.append((ancestor, child in ancestor.body))
            child = ancestor
        return found

    def surely_before(self, first: Placed, second: Placed) -> bool:
        """Whether `second` only ever runs after `first` has: one function, no branch of its own around `first`."""
        if self.function_of(first) is not self.function_of(second) or position(first) >= position(second):
            return False
        return set(self.branches_of(first)) <= set(self.branches_of(second))

    # values

    def values_of(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a name is assigned in the function of `at`, or else in the module; in the order of the text."""
        return self._assigned.get((name, self.function_of(at))) or self._assigned.get((name, self.module), [])

    @cached_property
    def _assigned(self) -> dict[tuple[str, ast.AST], list[ast.expr]]:
        found: dict[tuple[str, ast.AST], list[ast.expr]] = defaultdict(list)
        for target, value, node in self.assigns:
            found[target, self.function_of(node)].append(value)
        return found

    def given_to_self(self, name: str) -> list[ast.expr]:
        """What any method assigns to `self.name`."""
        return [value for target, value, _ in self.assigns if target == name] if name.startswith("self.") else []

    def constant(self, node: ast.AST | None, kind: type | tuple[type, ...]) -> ast.Constant | None:
        """The literal of that type that a node is, or the only one that its name is ever given."""
        if isinstance(node, ast.Name):
            values = self.values_of(node.id, node)
            node = values[0] if len(values) == 1 and not self._is_parameter(node) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, kind) and not isinstance(node.value, bool):
            return node
        return None

    def _is_parameter(self, name: ast.Name) -> bool:
        scope = self.function_of(name)
        return isinstance(scope, Function) and any(a.arg == name.id for a in parameters_of(scope))

    def parameter(self, name: str, at: ast.AST) -> bool:
        """Whether a name comes into the function of `at` from its caller."""
        scope = self.function_of(at)
        return isinstance(scope, Function) and any(a.arg == name for a in parameters_of(scope))

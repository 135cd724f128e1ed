"""Parses a script, and answers where its nodes are: their names, the calls, and the loops and branches around them."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Protocol, TypeVar

from labkit.checking.syntax.nodes import Function, Loop, MethodCall, is_main_guard, is_method_call, position, spelled

Location = Callable[[int], str]
N = TypeVar("N", bound=ast.AST)
T = TypeVar("T")


class ByKind(Protocol):
    def __getitem__(self, kind: type[N], /) -> list[N]: ...


# The usual meaning of unbound names in a fragment, because articles omit imports.
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
# Fields without nodes, or with those of contexts and operators, of which one stands for all of its kind.
NO_NODES = {"ctx", "op", "ops", "id", "attr", "kind", "type_comment", "level", "module", "asname", "conversion"}
KINDS = [kind for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, ast.AST)]
FIELDS = {kind: [field for field in kind._fields if field not in NO_NODES] for kind in KINDS}
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ENDS = (ast.Module, *SCOPES)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Parsed:
    """A script's text, parsed once. Raises SyntaxError or ValueError if the text is not Python."""

    def __init__(self, text: str, *, says: str = "", is_fragment: bool = False, location: Location = "line {}".format):
        self.text = text
        self.lines = text.split("\n")  # as ast counts them
        self.says = says  # text outside of the code: a notebook's settings
        self.location = location  # describes a line by its place in the original file
        self.is_fragment = is_fragment  # a part of a program: a block of an article, a notebook's cells
        self.module = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}  # the enclosing function of each node
        self._order: list[ast.AST] = []
        self._spans: dict[ast.AST, tuple[int, int]] = {}  # the numbers of a node and of the last one in it
        nodes: dict[type[ast.AST], list[Any]] = defaultdict(list)
        self.nodes: ByKind = nodes
        self.kept: dict[Any, Any] = {}  # cache of queries
        self._read()
        self.calls: list[ast.Call] = self.nodes[ast.Call]

    def _read(self) -> None:
        pending: list[ast.AST] = [self.module]
        scopes, parents, order = self._scopes, self.parents, self._order
        while pending:  # unlike ast.walk, in the order of the text and with parents
            node = pending.pop()
            order.append(node)
            kind = type(node)
            self.nodes[kind].append(node)
            scope = node if isinstance(node, SCOPES) else scopes.get(node, self.module)
            children: list[ast.AST] = []
            for field in FIELDS[kind]:
                value = getattr(node, field, None)
                parts = value if isinstance(value, list) else (value,)
                children += [part for part in parts if isinstance(part, ast.AST)]
            for child in children:
                parents[child] = node
                scopes[child] = scope
            pending += reversed(children)
        ends = list(range(len(order)))
        numbers = {node: number for number, node in enumerate(order)}
        for number in range(len(order) - 1, 0, -1):
            around = numbers[parents[order[number]]]
            ends[around] = max(ends[around], ends[number])
        self._spans = {node: (number, ends[number]) for node, number in numbers.items()}

    # definitions

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions and methods by their name."""
        functions: dict[str, list[Function]] = defaultdict(list)
        nodes: list[Function] = [*self.nodes[ast.FunctionDef], *self.nodes[ast.AsyncFunctionDef]]
        for function in nodes:
            functions[function.name].append(function)
        return functions

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.nodes[ast.ClassDef]}

    @cached_property
    def imports(self) -> dict[str, str]:
        """What is imported, at full length, by the name that it has in the script."""
        modules = (alias for node in self.nodes[ast.Import] for alias in node.names)
        tops = ((alias.asname, alias.name if alias.asname else alias.name.split(".")[0]) for alias in modules)
        parts = ((f"{source}.{alias.name}", alias) for source, alias in self._imported_parts)
        return {local or name: name for local, name in tops} | {a.asname or a.name: name for name, a in parts}

    @cached_property
    def _imported_parts(self) -> list[tuple[str, ast.alias]]:
        """The module, and what is imported from it: `("torch", nn)` of `from torch import nn`."""
        nodes = self.nodes[ast.ImportFrom]
        return [("." * node.level + (node.module or ""), alias) for node in nodes for alias in node.names]

    @cached_property
    def assigns(self) -> list[tuple[str, ast.expr, ast.stmt]]:
        """(target as text, value, statement) of all assignments, in the order of the text."""
        found: list[tuple[ast.expr, ast.expr, ast.stmt]] = []
        nodes: list[ast.Assign | ast.AnnAssign] = [*self.nodes[ast.Assign], *self.nodes[ast.AnnAssign]]
        for node in sorted(nodes, key=position):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if node.value is None:
                    continue  # a declaration
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    found += [(*pair, node) for pair in zip(target.elts, node.value.elts, strict=False)]
                else:
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    found += [(part, node.value, node) for part in parts]
        return [(name, value, node) for part, value, node in found if (name := spelled(part))]

    # names

    @cached_property
    def words(self) -> set[str]:
        """Every identifier, attribute, keyword and part of an imported name."""
        words = {node.id for node in self.nodes[ast.Name]} | {node.attr for node in self.nodes[ast.Attribute]}
        words |= {node.arg for node in self.nodes[ast.keyword] if node.arg} | {a.arg for a in self.nodes[ast.arg]}
        sources = [alias.name for node in self.nodes[ast.Import] for alias in node.names]
        sources += [f"{source}.{alias.name}" for source, alias in self._imported_parts]
        return words | {part for source in sources for part in source.split(".")}

    @cached_property
    def bound(self) -> set[str]:
        """The names to which the script itself gives a value."""
        stored = {node.id for node in self.nodes[ast.Name] if isinstance(node.ctx, ast.Store)}
        return stored | {node.arg for node in self.nodes[ast.arg]} | {*self.functions, *self.classes}

    def dotted(self, node: ast.AST) -> str:
        """`dist.barrier` as "torch.distributed.barrier"; "" for anything but a dotted name."""
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        usual = node.id if node.id in self.bound else USUAL.get(node.id, node.id)
        base = self.imports.get(node.id, usual)
        return ".".join([base, *reversed(attributes)])

    @cached_property
    def names_of_calls(self) -> dict[ast.Call, str]:
        return {call: self.dotted(call.func) for call in self.calls}

    def called(self, node: ast.AST | None) -> str:
        """The full name of what a node calls: "torch.save"; "" if it calls nothing that has a name."""
        return self.names_of_calls.get(node, "")  # type: ignore[call-overload, no-any-return]

    def class_made(self, node: ast.AST | None) -> ast.ClassDef | None:
        """The class of this script of which a call makes an object."""
        return self.classes.get(self.called(node))

    @cached_property
    def packages(self) -> set[str]:
        """The packages that the script imports."""
        return {name.split(".")[0] for name in self.imports.values()}

    def targets_of(self, node: ast.AST | None) -> list[str]:
        """The names to which a value is assigned as it is."""
        targets = getattr(self.parents.get(node), "targets", []) if node is not None else []
        return [name for target in targets if (name := spelled(target))]

    @cached_property
    def environment(self) -> list[tuple[str, ast.Subscript]]:
        """Each `os.environ["NAME"]`, with the name."""
        uses = (node for node in self.nodes[ast.Subscript] if self.dotted(node.value) in ("os.environ", "environ"))
        return [(str(node.slice.value), node) for node in uses if isinstance(node.slice, ast.Constant)]

    # calls

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        """Calls of torch's functions by the last part of their name, of methods by ".name"."""
        calls: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            if (name := self.names_of_calls[call]).startswith("torch."):
                calls[name.rsplit(".", 1)[1]].append(call)
            if isinstance(call.func, ast.Attribute):
                calls[f".{call.func.attr}"].append(call)
        return calls

    def torch_calls(self, *names: str, within: ast.AST | None = None) -> Iterator[ast.Call]:
        """Calls of torch's functions `names` from any of its modules, in the order of the text."""
        return self._calls(names, within)

    def method_calls(self, *names: str, within: ast.AST | None = None) -> Iterator[MethodCall]:
        """Calls `anything.name(…)`, in the order of the text."""
        return filter(is_method_call, self._calls([f".{name}" for name in names], within))

    def calls_to(self, *names: str) -> list[ast.Call]:
        """Calls of functions by their full names."""
        return [call for call, name in self.names_of_calls.items() if name in names]

    def _calls(self, names: Iterable[str], within: ast.AST | None) -> Iterator[ast.Call]:
        calls = [call for name in names for call in self._calls_by_name.get(name, ())]
        inside = calls if within is None else [call for call in calls if self.is_in(call, within)]
        return iter(sorted(inside, key=position))

    def walk(self, node: ast.AST) -> list[ast.AST]:
        """A node and all within it, in the order of the text; without contexts and operators."""
        first, last = self._spans[node]
        return self._order[first : last + 1]

    def nodes_in(self, within: ast.AST, kind: type[N]) -> list[N]:
        """The nodes of a kind within a node, in the order of the text."""
        return [node for node in self.nodes[kind] if self.is_in(node, within)]

    def names_in(self, *nodes: ast.AST) -> set[str]:
        """The names in expressions or statements, without their attributes."""
        return {part.id for node in nodes for part in self.walk(node) if isinstance(part, ast.Name)}

    def spelled_in(self, *nodes: ast.AST) -> set[str]:
        """The names in expressions, with and without their attributes: `model.loss` and `model`."""
        return {spelled(part) for node in nodes for part in self.walk(node)} - {""}

    def stored_in(self, *nodes: ast.AST) -> set[str]:
        """The names that get a value in expressions or statements."""
        names = (part for node in nodes for part in self.walk(node) if isinstance(part, ast.Name))
        return {name.id for name in names if isinstance(name.ctx, ast.Store)}

    def calls_in(self, node: ast.AST) -> list[ast.Call]:
        """The calls within a node, which may be one itself."""
        first, last = self._spans[node]
        return self.calls[bisect_left(self._call_numbers, first) : bisect_left(self._call_numbers, last + 1)]

    @cached_property
    def _call_numbers(self) -> list[int]:
        return [self._spans[call][0] for call in self.calls]

    # places

    def is_in(self, node: ast.AST, *places: ast.AST) -> bool:
        """Whether a node is in one of the places, or is one."""
        number = self._spans[node][0]
        return any(first <= number <= last for first, last in map(self._spans.__getitem__, places))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def enclosing(self, node: ast.AST, *kinds: type[N]) -> Iterator[N]:
        """The nodes of some kinds around a node, the innermost first."""
        return (parent for parent in self.ancestors(node) if isinstance(parent, kinds))

    def function_of(self, node: ast.AST) -> ast.AST:
        """The enclosing function of a node, or the module."""
        return self._scopes.get(node, self.module)

    def statement_of(self, node: ast.expr) -> ast.stmt:
        return next(self.enclosing(node, ast.stmt))

    def contexts_of(self, node: ast.AST) -> list[ast.expr]:
        """The contexts of the `with`s around a node, the innermost first."""
        return [item.context_expr for around in self.enclosing(node, ast.With) for item in around.items]

    def loops_of(self, node: ast.AST) -> list[Loop]:
        """The loops around a node within its function, the innermost first."""
        return self.outwards("loops", node, lambda around, _: [around] if isinstance(around, LOOPS) else [])

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost loop around a node within its function."""
        return next(iter(self.loops_of(node)), None)

    def branches_of(self, node: ast.AST, within: ast.AST | None = None) -> list[tuple[ast.If, bool]]:
        """The `if`s around a node within its function, and whether it is in their first branch."""
        branches = self.outwards("branches", node, _branch)
        return branches if within is None else [branch for branch in branches if self.is_in(branch[0], within)]

    def outwards(self, query: str, node: ast.AST, found: Callable[[ast.AST, ast.AST], list[T]]) -> list[T]:
        """What a query finds in each node around a node, of which it also gets the part with the node: as far as the
        function, the innermost first."""
        known: dict[ast.AST, list[T]] = self.kept.setdefault(query, {})
        path: list[ast.AST] = []
        at: ast.AST | None = node
        while at is not None and at not in known:
            path.append(at)
            at = None if self._ends_there(at) else self.parents[at]
        for each in reversed(path):
            here = found(self.parents[each], each) if each in self.parents else []
            known[each] = here if self._ends_there(each) else [*here, *known[self.parents[each]]]
        return known[node]

    def _ends_there(self, node: ast.AST) -> bool:
        """Whether nothing of the same function is around the parent of a node."""
        return isinstance(self.parents.get(node, self.module), ENDS)

    def is_handed_on(self, function: Function) -> bool:
        """Whether a function is named without being called, as in `mp.spawn(main)`."""
        return function.name in self._handed_on

    @cached_property
    def _handed_on(self) -> set[str]:
        called = {call.func for call in self.calls}
        return {node.id for node in self.nodes[ast.Name] if node not in called and isinstance(node.ctx, ast.Load)}


def _branch(around: ast.AST, child: ast.AST) -> list[tuple[ast.If, bool]]:
    if not isinstance(around, ast.If) or child is around.test or is_main_guard(around):
        return []
    return [(around, child in around.body)]

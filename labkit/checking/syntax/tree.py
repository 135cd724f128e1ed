"""Parses a script into the Tree that the rules look at, and has helpers for its nodes."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard, TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Placed = ast.expr | ast.stmt | ast.excepthandler  # nodes with a line number


class MethodCall(ast.Call):
    """`anything.name(…)`, for the type checker: ast makes none."""

    func: ast.Attribute


def spelled(node: ast.AST | None) -> str:
    """`self.model` as text; "" for anything but a name with attributes."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def has_stars(call: ast.Call) -> bool:
    """Whether arguments are unknown, as in `f(*a, **b)`."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def parameters_of(function: Function) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def is_main_guard(node: ast.If) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))


def is_method_call(call: ast.Call) -> TypeGuard[MethodCall]:
    return isinstance(call.func, ast.Attribute)


def position(node: Placed) -> tuple[int, int]:
    return node.lineno, node.col_offset


UNKNOWN: Any = object()  # a value that the text does not tell
BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
CASTS: dict[str, Callable[[Any], Any]] = {"float": float, "int": int, "bool": bool}
MOST_ALTERNATIVES = 8
Location = Callable[[int], str]
N = TypeVar("N", bound=ast.AST)


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


WRAPPERS = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp1", "fully_shard": "fsdp2"}
# These handle sampling, wrapping, saving and clean-up, so a script that omits them is not wrong.
FRAMEWORKS = {
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "deepspeed",
    "horovod",
    "ray",
    "composer",
    "ignite",
    "fairscale",
    "colossalai",
    "megatron",
    "apex",
    "mmengine",
    "catalyst",
    "trl",
    "fastai",
    "torchtnt",
}


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


class Tree:
    """A script's text, parsed once: resolved imports, the position of each node, the values of names, the strategies
    that it uses and the models that they wrap. Raises SyntaxError or ValueError if the text is not Python."""

    around = Around()

    def __init__(self, text: str, *, says: str = "", is_fragment: bool = False, location: Location = "line {}".format):
        self.text = text
        self.lines = text.split("\n")  # as ast counts them
        self.says = says  # text outside of the code: a notebook's settings
        self.location = location  # describes a line by its place in the original file
        self.is_fragment = is_fragment  # a part of a program: a block of an article, a notebook's cells
        self.module = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}  # the enclosing function of each node
        self.calls: list[ast.Call] = []
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.assigns: list[tuple[str, ast.expr, ast.stmt]] = []  # target as text, value, statement
        self.imports: dict[str, tuple[str, ast.stmt]] = {}  # by local name: the imported name and the statement
        self.words: set[str] = set()  # every identifier, attribute and keyword
        self.bound: set[str] = set()
        nodes: dict[type[ast.AST], list[Any]] = defaultdict(list)
        self.nodes: ByKind = nodes
        self.kept: dict[str, Any] = {}  # cache of queries
        self._read()

    def _read(self) -> None:
        pending: list[ast.AST] = [self.module]
        while pending:  # unlike ast.walk, in the order of the text and with parents
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
        """`dist.barrier` as "torch.distributed.barrier"; "" for anything but a dotted name."""
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

    def _calls(self, names: Iterable[str], within: ast.AST | None) -> Iterator[ast.Call]:
        calls = (call for name in names for call in self._calls_by_name.get(name, ()))
        return iter(sorted((call for call in calls if self.is_in(call, within)), key=position))

    def is_in(self, node: ast.AST, within: ast.AST | None) -> bool:
        return within is None or within is node or within in self.ancestors(node)

    # places

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> ast.AST:
        """The enclosing function of a node, or the module."""
        return self._scopes.get(node, self.module)

    def statement_of(self, node: ast.AST) -> ast.stmt | None:
        return next((a for a in (node, *self.ancestors(node)) if isinstance(a, ast.stmt)), None)

    def loops_of(self, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops around a node within its function, the innermost first."""
        loops = []
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, Function | ast.Lambda):
                break
            if isinstance(ancestor, ast.For | ast.AsyncFor | ast.While):
                loops.append(ancestor)
        return loops

    def branches_of(self, node: ast.AST) -> list[tuple[ast.If, bool]]:
        """The `if`s around a node within its function, and whether it is in their first branch."""
        branches = []
        child = node
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, Function | ast.Lambda):
                break
            if isinstance(ancestor, ast.If) and child is not ancestor.test and not is_main_guard(ancestor):
                branches.append((ancestor, child in ancestor.body))
            child = ancestor
        return branches

    def is_handed_on(self, function: Function) -> bool:
        """Whether a function is named without being called, as in `mp.spawn(main)`."""
        return function.name in self._handed_on

    @cached_property
    def _handed_on(self) -> set[str]:
        called = {call.func for call in self.calls}
        return {node.id for node in self.nodes[ast.Name] if node not in called and isinstance(node.ctx, ast.Load)}

    def surely_before(self, first: Placed, second: Placed) -> bool:
        """Whether `first` always runs before `second`: same function, no further condition around `first`."""
        if self.function_of(first) is not self.function_of(second) or position(first) >= position(second):
            return False
        return set(self.branches_of(first)) <= set(self.branches_of(second))

    # values

    def values_of(self, name: str, at: ast.AST) -> list[ast.expr]:
        """The values assigned to a name in the function of `at`, or else in the module, in the order of the text."""
        return self.assigned.get((name, self.function_of(at))) or self.assigned.get((name, self.module), [])

    @cached_property
    def assigned(self) -> dict[tuple[str, ast.AST], list[ast.expr]]:
        values: dict[tuple[str, ast.AST], list[ast.expr]] = defaultdict(list)
        for target, value, node in self.assigns:
            values[target, self.function_of(node)].append(value)
        return values

    def assigned_to_self(self, name: str) -> list[ast.expr]:
        """The values that any method assigns to `self.name`."""
        return [value for target, value, _ in self.assigns if target == name] if name.startswith("self.") else []

    def value(self, node: ast.AST | None, known: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The only value that an expression can have; UNKNOWN if there are several or the text does not tell. `known`
        has values of names, such as "args.lr"."""
        first, *others = self.alternatives(node, known)
        return first if not others else UNKNOWN

    def is_true(self, node: ast.AST | None) -> bool:
        return node is not None and self.value(node) is True

    def default(self, node: ast.AST | None) -> Any:
        """The value of an expression if no option is passed to the script; UNKNOWN if the text does not tell."""
        first, *others = self.alternatives(node, {}, with_defaults=True)
        return first if not others else UNKNOWN

    def alternatives(
        self, node: ast.AST | None, known: Mapping[str, Any], depth: int = 6, *, with_defaults: bool = False
    ) -> list[Any]:
        """The values that an expression can have, of which UNKNOWN stands for any; torch's constants by their names. A
        flag that is not known can be True and False, and `self.training` is True. `with_defaults` assumes that no
        option is passed."""

        def inner(part: ast.AST) -> list[Any]:
            return self.alternatives(part, known, depth - 1, with_defaults=with_defaults)

        values: list[Any] = [UNKNOWN]
        if isinstance(node, ast.Constant):
            values = [node.value]
        elif (name := spelled(node)) in known:
            values = [known[name]]
        elif depth and isinstance(node, ast.Name):
            values = [value for part in self.bound_to(node) for value in inner(part)] or [UNKNOWN]
        elif depth and isinstance(node, ast.Attribute):
            values = self._of_attribute(node, inner, with_defaults)
        elif depth and isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
            values = [_computed(UNARY[type(node.op)], value) for value in inner(node.operand)]
        elif depth and isinstance(node, ast.BinOp):
            pairs = itertools.product(inner(node.left), inner(node.right))
            values = [_computed(BINARY.get(type(node.op)), *pair) for pair in pairs]
        elif depth and isinstance(node, ast.Compare) and len(node.ops) == 1:
            pairs = itertools.product(inner(node.left), inner(node.comparators[0]))
            values = [_computed(BINARY.get(type(node.ops[0])), *pair) for pair in pairs]
        elif depth and isinstance(node, ast.IfExp):
            tests = inner(node.test)
            branches = [node.body] * any(t is UNKNOWN or t for t in tests)
            branches += [node.orelse] * any(t is UNKNOWN or not t for t in tests)
            values = [value for branch in branches for value in inner(branch)]
        elif depth and isinstance(node, ast.BoolOp):
            values = inner(node.values[0])
            for part in node.values[1:]:
                ends = isinstance(node.op, ast.Or)
                values = [v for first in values for v in _chosen(first, ends, inner(part))][:MOST_ALTERNATIVES]
        elif depth and isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            cast = CASTS.get(self.dotted(node.func))
            values = [_computed(cast, value) for value in inner(node.args[0])]
        if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            values = [flag for value in values for flag in ([True, False] if value is UNKNOWN else [value])]
        unique = [v for i, v in enumerate(values) if not any(v is w or _same(v, w) for w in values[:i])]
        return unique if len(unique) <= MOST_ALTERNATIVES else [UNKNOWN]

    def bound_to(self, name: ast.Name) -> list[ast.expr]:
        """All that is assigned to a name; nothing if a loop, a call or an addition also binds it."""
        if self.parameter(name.id, name):
            return []
        values = self.values_of(name.id, name)
        return values if len(values) == self._stores[name.id] else []

    @cached_property
    def _stores(self) -> Counter[str]:
        """How often names are bound in the script, by their name."""
        names = Counter(node.id for node in self.nodes[ast.Name] if isinstance(node.ctx, ast.Store))
        return names + Counter(node.arg for node in self.nodes[ast.arg])

    def _of_attribute(
        self, node: ast.Attribute, inner: Callable[[ast.AST], list[Any]], with_defaults: bool
    ) -> list[Any]:
        name = self.dotted(node)
        if name == "self.training":
            return [True]
        if name.startswith("torch."):
            return [name]
        if with_defaults and isinstance(node.value, ast.Name) and len(self._options.get(node.attr, ())) == 1:
            return inner(self._options[node.attr][0])
        return [UNKNOWN]

    @cached_property
    def _options(self) -> dict[str, list[ast.expr]]:
        """The defaults of the script's options, `parser.add_argument("--lr", default=…)`, by their attribute."""
        defaults: dict[str, list[ast.expr]] = defaultdict(list)
        for call in self.method_calls("add_argument"):
            names = [str(part.value) for part in call.args if isinstance(part, ast.Constant)]
            long = next((name for name in names if name.startswith("--")), "")
            flag = ast.Constant(False) if self.value(keyword(call, "action")) == "store_true" else None
            if (default := keyword(call, "default") or flag) is not None:
                defaults[long.removeprefix("--").replace("-", "_")].append(default)
        return defaults

    def constant(self, node: ast.AST | None, kind: type | tuple[type, ...]) -> ast.Constant | None:
        """The node if it is a literal of that type, or the only value of its name if that is one."""
        if isinstance(node, ast.Name):
            values = self.values_of(node.id, node)
            node = values[0] if len(values) == 1 and not self.parameter(node.id, node) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, kind) and not isinstance(node.value, bool):
            return node
        return None

    def parameter(self, name: str, at: ast.AST) -> bool:
        """Whether a name is a parameter of the function of `at`."""
        scope = self.function_of(at)
        return isinstance(scope, Function) and any(a.arg == name for a in parameters_of(scope))

    @cached_property
    def wraps(self) -> list[Wrap]:
        return [wrap for call in self.torch_calls(*WRAPPERS) if (wrap := self._wrap(call))]

    def _wrap(self, call: ast.Call) -> Wrap | None:
        strategy = WRAPPERS[self.names_of_calls[call].rsplit(".", 1)[1]]
        source = call.args[0] if call.args else keyword(call, "module")
        if source is None:
            return None  # a decorator or a partial: the model is unknown
        parent = self.parents[call]
        names = [name for target in getattr(parent, "targets", []) if (name := spelled(target))]
        if strategy == "fsdp2" and (name := spelled(source)):  # in place
            names.append(name)
        return Wrap(call, strategy, source, tuple(dict.fromkeys(names)))

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
        names = [name for name, _ in self.imports.values()]
        if any(name.split(".")[0] in FRAMEWORKS or name.startswith("torch.distributed.rpc") for name in names):
            return True
        return any(name.startswith("transformers.") and name.endswith("Trainer") for name in names)

    @cached_property
    def has_main_guard(self) -> bool:
        """Whether the script has `if __name__ == "__main__":`."""
        return any(is_main_guard(node) for node in self.nodes[ast.If])

    @cached_property
    def is_a_test(self) -> bool:
        """Whether this is a test, which may be slow on purpose."""
        return any(name.split(".")[0] in ("pytest", "unittest") for name, _ in self.imports.values())

    @cached_property
    def is_on_gpu(self) -> bool:
        return bool(self.words & {"cuda", "accelerator", "xpu"}) or any(re.match(r"cuda|nccl", s) for s in self.strings)

    def wrapping(self, node: ast.AST | None) -> frozenset[str]:
        """The strategies that wrap the model in this expression, judged by its name: `model` after
        `model = DDP(model)`, even in a function with a parameter of that name."""
        if node is None or not (name := spelled(node)):
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


def _computed(function: Callable[..., Any] | None, *values: Any) -> Any:
    if function is None or any(value is UNKNOWN for value in values):
        return UNKNOWN
    if function in (operator.mul, operator.mod) and not all(isinstance(value, int | float) for value in values):
        return UNKNOWN  # not of texts, which could get long
    try:
        return function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return UNKNOWN


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _chosen(first: Any, ends: bool, others: list[Any]) -> list[Any]:
    """The values of `first or other` (`ends` is True) or `first and other`."""
    if first is UNKNOWN:
        return [UNKNOWN, *others]
    return [first] if bool(first) is ends else others


@lru_cache(maxsize=1)
def tree_of(text: str) -> Tree:
    """The tree of a whole script, which a launch looks at twice. Raises as Tree does."""
    return Tree(text)

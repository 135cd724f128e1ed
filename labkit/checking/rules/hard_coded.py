"""Rules about hard-coded values that hold only on one machine or for one run at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.nodes import argument_at, is_method_call, keyword, last_part, spelled
from labkit.checking.syntax.ranks import may_depend_on_rank
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.ways import is_rank

DEVICES = ("torch.device", "torch.set_default_device", "torch.cuda.set_device", "torch.accelerator.set_device_index")
CUDA_0 = ("cuda:0", "xpu:0")


@rule(
    "LK011 wrong",
    why="The launcher determines the number of ranks. A hard-coded number fails on a machine with fewer GPUs, leaves "
    "GPUs idle on a machine with more, or waits for ranks that never start.",
    fix="Start with torchrun and use dist.get_world_size(); with mp.spawn, nprocs=torch.cuda.device_count().",
    misses="a number from a file or an option's default.",
)
def hard_coded_world_size(tree: Tree) -> Mistakes:
    if tree.is_managed:
        return
    sizes = [(keyword(call, "world_size"), call) for call in tree.torch_calls("init_process_group")]
    sizes += [(argument_at(call, 2, "nprocs"), call) for call in tree.torch_calls("spawn")]
    values = [value for value, call in sizes if not tree.branches_of(call)]
    for literal, ranks in _numbers(tree, [*values, *(value for value, _ in _stored(tree, "WORLD_SIZE"))]):
        if ranks > 1:
            yield literal, f"{ranks} ranks are hard-coded"


@rule(
    "LK012 wrong",
    why="Two runs on one machine use the same port: the second fails with EADDRINUSE or joins the first.",
    fix="Start with torchrun, which finds a port and sets MASTER_ADDR and MASTER_PORT. Otherwise call "
    "os.environ.setdefault('MASTER_PORT', …) with a free port.",
    misses="a port from a file or an option's default.",
)
def hard_coded_port(tree: Tree) -> Mistakes:
    for literal, port in _numbers(tree, [value for value, _ in _stored(tree, "MASTER_PORT")]):
        if port:
            yield literal, f"port {port} is hard-coded"
    for call in tree.torch_calls("init_process_group"):
        where = _literal(tree, keyword(call, "init_method"))
        address = str(where.value) if where else ""
        if where and address.startswith("tcp://") and address.rsplit(":", 1)[-1].isdigit():
            yield where, f"{address} is hard-coded"


def _literal(tree: Tree, node: ast.expr | None) -> ast.Constant | None:
    """The number or text that an expression is or, through a name that is assigned once, stands for."""
    node = tree.resolved(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | str) and not isinstance(node.value, bool):
        return node
    return None


def _numbers(tree: Tree, values: list[ast.expr | None]) -> Iterator[tuple[ast.Constant, int]]:
    """The literals, each once, that are whole numbers or the text of one, with the number."""
    for literal in dict.fromkeys(_literal(tree, value) for value in values):
        text = str(literal.value).strip() if literal else ""
        if literal and text.isdecimal():
            yield literal, int(text)


def _stored(tree: Tree, variable: str) -> list[tuple[ast.expr, ast.stmt]]:
    """The value and the statement of each `os.environ["MASTER_PORT"] = "12355"`, unless under a condition."""
    stores = [tree.parents[node] for name, node in tree.environment if name == variable]
    return [(node.value, node) for node in stores if isinstance(node, ast.Assign) and not tree.branches_of(node)]


@rule(
    "LK013 wrong",
    why="Every rank uses GPU 0: the other GPUs are idle, and its memory must hold all ranks. NCCL "
    "does not allow two ranks on one GPU.",
    fix="Use device = torch.device('cuda', int(os.environ['LOCAL_RANK'])); torch.cuda.set_device(device).",
    misses="a device from an option's default; anything under a condition, which may be for one GPU.",
)
def device_zero(tree: Tree) -> Mistakes:
    if not tree.is_distributed or tree.is_managed:
        return
    seen = set()
    for call in tree.calls:
        place = _zero(tree, _place_given(tree, call))
        if place is None or place in seen or tree.branches_of(call) or may_depend_on_rank(tree, call):
            continue
        if not any(tree.enclosing(call, ast.Compare)):
            seen.add(place)
            yield place, "every rank uses device 0"
    for value, node in _stored(tree, "CUDA_VISIBLE_DEVICES"):
        if tree.value(value) == "0":
            yield node, "every rank sees GPU 0 only"


def _place_given(tree: Tree, call: ast.Call) -> ast.expr | None:
    """The device that is passed to a call."""
    name = tree.called(call)
    first = next(iter(call.args), None)
    if name in DEVICES:
        if name == "torch.device" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            return call.args[1] if getattr(first, "value", "") in ("cuda", "xpu") else None
        return keyword(call, "device") or first
    if is_method_call(call, "to", "cuda"):
        return keyword(call, "device") or first
    if name == "torch.load":
        return argument_at(call, 1, "map_location")
    if name.endswith("DistributedDataParallel"):
        ids = keyword(call, "device_ids")
        return ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
    # queries (torch.cuda.memory_allocated) may refer to any device
    asks = name.startswith(("torch.cuda.", "torch.xpu.", "torch.accelerator."))
    return keyword(call, "device") if name.startswith("torch.") and not asks else None


def _zero(tree: Tree, node: ast.expr | None) -> ast.expr | None:
    """The literal for device 0."""
    node = tree.resolved(node)
    if isinstance(node, ast.IfExp):  # "cuda:0" if torch.cuda.is_available() else "cpu"
        return _zero(tree, node.body)
    literal = _literal(tree, node)
    return literal if literal and literal.value in (0, *CUDA_0) else None


@rule(
    "LK014 wrong",
    why="A bare .cuda() uses the current device, which is GPU 0 in every process unless it is set: all ranks share GPU "
    "0, which NCCL does not allow.",
    fix="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group.",
    misses="a device set in another file, or by CUDA_VISIBLE_DEVICES in the shell.",
)
def no_set_device(tree: Tree) -> Mistakes:
    joined = list(tree.torch_calls("init_process_group"))
    setters = {"set_device", "set_device_index", "CUDA_VISIBLE_DEVICES"}
    is_set = (tree.words | tree.strings) & setters or any(keyword(c, "device_id") for c in joined)
    contexts = {item.context_expr for node in tree.nodes[ast.With] for item in node.items}
    if not joined or tree.is_managed or is_set or contexts & {*tree.calls_to("torch.device", "torch.cuda.device")}:
        return
    for call in tree.method_calls("cuda", "to"):
        method, arguments = call.func.attr, [*call.args, *(k.value for k in call.keywords if k.arg == "device")]
        bare = method == "cuda" and not arguments and not spelled(call.func).startswith("torch.")
        named = method == "to" and arguments and tree.value(arguments[0]) == "cuda"
        if (bare or named) and not tree.branches_of(call):
            yield call, "no rank has selected its own GPU, so this is GPU 0 on all of them"
            return  # report the first only


@rule(
    "LK015 wrong",
    why="Not every version of torch accepts a number: 2.6 raises AttributeError ('int' object has no attribute "
    "'type'), 2.13 accepts it with an accelerator and raises ValueError without one.",
    fix="Use device_id=torch.device('cuda', local_rank), and omit it with gloo. (FSDP's device_id may be a number.)",
    misses="a number whose name does not mention ranks, or that is a function's parameter.",
)
def device_id_int(tree: Tree) -> Mistakes:
    for call in tree.torch_calls("init_process_group"):
        device = keyword(call, "device_id")
        if device is not None and _is_number(tree, device):
            yield device, "device_id is a number, not a torch.device"


def _is_number(tree: Tree, node: ast.expr) -> bool:
    values = tree.values(node) if isinstance(node, ast.Name) else []
    if any("device" in ast.unparse(value) and "count" not in ast.unparse(value) for value in values):
        return False
    if isinstance(node, ast.BinOp):
        return _is_number(tree, node.left)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    is_gpu_name = last_part(spelled(node)) in ("gpu", "gpu_id", "local_gpu") and not isinstance(node, ast.Call)
    return is_rank(tree, node) or is_gpu_name or any(_is_number(tree, v) for v in values if not isinstance(v, ast.Name))

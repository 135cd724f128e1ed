"""Rules about what is written into a script that only one machine, or one run at a time, has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.register import Mistakes, rule
from labkit.checking.syntax.nodes import Placed, keyword, spelled
from labkit.checking.syntax.ranks import is_rank, may_depend_on_rank
from labkit.checking.syntax.tree import Tree

SETS_DEVICE = (
    "torch.device",
    "torch.set_default_device",
    "torch.cuda.set_device",
    "torch.accelerator.set_device_index",
)
CUDA_0 = ("cuda:0", "xpu:0")


@rule(
    "hard-coded-world-size",
    "wrong",
    why="The number of ranks is the launcher's to say. Written into the script it fails on a machine with fewer GPUs, "
    "leaves the others idle on one with more, or waits for ranks that never come.",
    fix="Start with torchrun and take dist.get_world_size(); with mp.spawn, nprocs=torch.cuda.device_count().",
    misses="a number that comes from a file or an option's default.",
)
def hard_coded_world_size(tree: Tree) -> Mistakes:
    if tree.is_managed:
        return
    given: list[tuple[ast.expr | None, Placed]] = []
    given += [(keyword(c, "world_size"), c) for c in tree.torch_calls("init_process_group")]
    given += [(keyword(c, "nprocs") or (c.args[2] if len(c.args) > 2 else None), c) for c in tree.torch_calls("spawn")]
    given += [(value, node) for key, value, node in _environment(tree) if key == "WORLD_SIZE"]
    seen = set()
    for value, node in given:
        number = tree.constant(value, (int, str))
        ranks = str(number.value) if number is not None else ""
        if number is None or not ranks.isdigit() or int(ranks) < 2 or tree.branches_of(node):
            continue
        if number not in seen:  # told once, where the number is
            seen.add(number)
            yield number, f"{ranks} ranks are written into the script"


@rule(
    "hard-coded-port",
    "wrong",
    why="Two runs on one machine meet at the same port: the second one fails with EADDRINUSE, or joins the first.",
    fix="Start with torchrun, which finds a port and sets MASTER_ADDR and MASTER_PORT. Without it: "
    "os.environ.setdefault('MASTER_PORT', …) with a port that was found free.",
    misses="a port from a file or an option's default.",
)
def hard_coded_port(tree: Tree) -> Mistakes:
    given = [value for key, value, node in _environment(tree) if key == "MASTER_PORT" and not tree.branches_of(node)]
    seen = set()
    for value in given:
        port = tree.constant(value, (int, str))
        if port is not None and str(port.value).strip().isdigit() and port not in seen and port.value not in (0, "0"):
            seen.add(port)
            yield port, f"port {port.value!s} is written into the script"
    for call in tree.torch_calls("init_process_group"):
        where = tree.constant(keyword(call, "init_method"), str)
        address = str(where.value) if where is not None else ""
        if where is not None and address.startswith("tcp://") and address.rsplit(":", 1)[-1].isdigit():
            yield where, f"{address} is written into the script"


def _environment(tree: Tree) -> Iterator[tuple[str, ast.expr, ast.stmt]]:
    """`os.environ["MASTER_PORT"] = "12355"`."""
    for node in tree.nodes[ast.Assign]:
        for target in node.targets:
            if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
                continue
            if tree.dotted(target.value) == "os.environ":
                yield str(target.slice.value), node.value, node


@rule(
    "device-zero",
    "wrong",
    why="Every rank uses GPU 0: the others stand idle, and its memory must hold all ranks. NCCL refuses two ranks on "
    "one GPU.",
    fix="device = torch.device('cuda', int(os.environ['LOCAL_RANK'])); torch.cuda.set_device(device).",
    misses="a device that only an option's default names; anything in a branch of its own, which may be for one GPU.",
)
def device_zero(tree: Tree) -> Mistakes:
    if not tree.is_distributed or tree.is_managed:
        return
    seen = set()
    for call in tree.calls:
        place = _zero(tree, _place_given(tree, call))
        if place is None or place in seen or tree.branches_of(call) or may_depend_on_rank(tree, call):
            continue
        if not any(isinstance(a, ast.Compare) for a in tree.ancestors(call)):
            seen.add(place)  # told once, where the number is
            yield place, "every rank uses device 0"
    for key, value, node in _environment(tree):
        if key == "CUDA_VISIBLE_DEVICES" and getattr(value, "value", "") == "0" and not tree.branches_of(node):
            yield node, "every rank sees GPU 0 only"


def _place_given(tree: Tree, call: ast.Call) -> ast.expr | None:
    """The device that a call is told."""
    name = tree.names_of_calls[call]
    first = call.args[0] if call.args else None
    if name in SETS_DEVICE:
        if name == "torch.device" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            return call.args[1] if getattr(first, "value", "") in ("cuda", "xpu") else None
        return keyword(call, "device") or first
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda"):
        return keyword(call, "device") or first
    if name == "torch.load":
        return keyword(call, "map_location") or (call.args[1] if len(call.args) > 1 else None)
    if name.endswith("DistributedDataParallel"):
        ids = keyword(call, "device_ids")
        return ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
    # what asks about a device (torch.cuda.memory_allocated) may ask about any
    asks = name.startswith(("torch.cuda.", "torch.xpu.", "torch.accelerator."))
    return keyword(call, "device") if name.startswith("torch.") and not asks else None


def _zero(tree: Tree, node: ast.expr | None) -> ast.expr | None:
    """The literal that says device 0, through a name that is given once."""
    if isinstance(node, ast.Name):
        values = tree.values_of(node.id, node)
        literal = values[0] if len(values) == 1 and not tree.parameter(node.id, node) else None
        return _zero(tree, literal) if isinstance(literal, ast.Constant | ast.IfExp) else None
    if isinstance(node, ast.IfExp):  # "cuda:0" if torch.cuda.is_available() else "cpu"
        return _zero(tree, node.body)
    is_zero = isinstance(node, ast.Constant) and not isinstance(node.value, bool) and node.value in (0, *CUDA_0)
    return node if is_zero else None


@rule(
    "no-set-device",
    "wrong",
    why="A bare .cuda() means the current device, which is GPU 0 in every process until it is told otherwise: all "
    "ranks share GPU 0, and NCCL refuses that.",
    fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the process group is made.",
    misses="a device that is set in another file, or by CUDA_VISIBLE_DEVICES in the shell.",
)
def no_set_device(tree: Tree) -> Mistakes:
    joined = list(tree.torch_calls("init_process_group"))
    told = {"set_device", "set_device_index", "CUDA_VISIBLE_DEVICES"}
    if (
        not joined
        or tree.is_managed
        or (tree.words | tree.strings) & told
        or any(keyword(c, "device_id") for c in joined)
    ):
        return
    if any(
        tree.dotted(item.context_expr.func) in ("torch.device", "torch.cuda.device")
        for node in tree.nodes[ast.With]
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
    ):
        return
    for call in tree.method_calls("cuda", "to"):
        method, given = call.func.attr, [*call.args, *(k.value for k in call.keywords if k.arg == "device")]
        bare = method == "cuda" and not given and not spelled(call.func).startswith("torch.")
        named = method == "to" and given and isinstance(given[0], ast.Constant) and given[0].value == "cuda"
        if (bare or named) and not tree.branches_of(call):
            yield call, "no rank was given a GPU of its own: this is GPU 0 on all of them"
            return  # the rest follow from it


@rule(
    "device-id-int",
    "wrong",
    why="Not every torch takes a number: 2.6 raises AttributeError ('int' object has no attribute 'type'), 2.13 takes "
    "it where there is an accelerator and raises ValueError where there is none.",
    fix="device_id=torch.device('cuda', local_rank), and leave it out with gloo. (FSDP's own may be a number.)",
    misses="a number under a name that says nothing of ranks, or that a function is given.",
)
def device_id_int(tree: Tree) -> Mistakes:
    for call in tree.torch_calls("init_process_group"):
        given = keyword(call, "device_id")
        if given is not None and _is_number(tree, given):
            yield given, "device_id is a number, not a torch.device"


def _is_number(tree: Tree, node: ast.expr) -> bool:
    values = tree.values_of(node.id, node) if isinstance(node, ast.Name) else []
    if any("device" in ast.unparse(value) and "count" not in ast.unparse(value) for value in values):
        return False
    if isinstance(node, ast.BinOp):
        return _is_number(tree, node.left)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    named_so = spelled(node).rsplit(".", 1)[-1] in ("gpu", "gpu_id", "local_gpu") and not isinstance(node, ast.Call)
    return is_rank(tree, node) or named_so or any(_is_number(tree, v) for v in values if not isinstance(v, ast.Name))

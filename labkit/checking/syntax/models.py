"""Answers queries about models: what makes, moves, prepares and trains them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.syntax.collectives import COLLECTIVES
from labkit.checking.syntax.flow import behind, callee, reached_from, returned
from labkit.checking.syntax.nodes import (
    Function,
    MethodCall,
    Placed,
    argument_at,
    is_method_call,
    keyword,
    last_part,
    method_of,
    operands,
    owner_of,
    position,
    spelled,
)
from labkit.checking.syntax.tree import Tree, kept
from labkit.checking.syntax.ways import is_rank

# Scripts with one of these may average gradients or parameters in their own way.
GRADIENTS = {"register_comm_hook", "register_hook", "register_post_accumulate_grad_hook", "average_parameters"}
TENSORS = re.compile(r"grad|param|\.data\b|weight|\bp\b|buffer|flat|vector|bucket", re.IGNORECASE)
NOT_OPTIMIZERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
OPTIMIZERS = re.compile(r"opt|scaler|sgd|adam", re.IGNORECASE)
TOKEN_MODEL = re.compile(r"For(CausalLM|Seq2SeqLM|ConditionalGeneration)$|LMHeadModel$")
DETACHES = ("detach", "detach_", "item", "data")
NO_MODULES = {"Parameter", "Buffer", "UninitializedParameter"}
RETURN_THEMSELVES = {"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "apply", "requires_grad_"}


def module_made(tree: Tree, value: ast.expr, depth: int = 2) -> str:
    """The class of the module that an expression makes, as of `Net().to(device)` or a function of this script: one of
    this script, which may be no module, of torch.nn or of torchvision; "" if it may make anything else."""
    while method_of(value) in RETURN_THEMSELVES and is_method_call(value) and isinstance(value.func.value, ast.Call):
        value = value.func.value
    function = callee(tree, value) if isinstance(value, ast.Call) and depth else None
    values = returned(tree, function) if function else []
    if len(values) == 1:
        return module_made(tree, values[0], depth - 1)
    name = tree.called(value)
    is_class = last_part(name)[:1].isupper() and last_part(name) not in NO_MODULES
    is_imported = is_class and name.startswith(("torch.nn.", "torchvision.models."))
    return name if is_imported or name in tree.classes else ""


def is_module_class(tree: Tree, name: str) -> bool:
    """Whether a class, as module_made knows it, is one of modules."""
    return name not in tree.classes or "torch.nn.Module" in map(tree.dotted, tree.classes[name].bases)


def trained_in(tree: Tree, loop: ast.AST) -> bool:
    """Whether a loop or function computes gradients, directly or through functions of this script."""
    return any(any(tree.method_calls("backward", within=place)) for place in reached_from(tree, loop))


def steps_in(tree: Tree, loop: ast.AST) -> list[MethodCall]:
    """Steps of an optimizer within a loop: `optimizer.step()`, `scaler.step(optimizer)`, not a scheduler's."""
    return [call for call in tree.method_calls("step", within=loop) if OPTIMIZERS.search(last_part(owner_of(call)))]


def optimizers(tree: Tree) -> Iterator[tuple[ast.Call, str]]:
    """(call, name) for each optimizer that is built from `name.parameters()`."""
    for call, name in tree.names_of_calls.items():
        if not name.startswith("torch.optim.") or name.startswith(NOT_OPTIMIZERS):
            continue
        parameters = argument_at(call, 0, "params")
        parts = behind(tree, parameters) if parameters is not None else []
        owners = (owner_of(part) for part in parts if is_method_call(part, "parameters", "named_parameters"))
        if model := next(filter(None, owners), ""):
            yield call, model


@kept
def preparations(tree: Tree) -> list[MethodCall]:
    """The calls of accelerate's `accelerator.prepare(…)`."""
    is_made = bool(tree.calls_to("accelerate.Accelerator"))
    return [call for call in tree.method_calls("prepare") if is_made or owner_of(call).endswith("accelerator")]


@kept
def prepared(tree: Tree) -> set[str]:
    """The names of what accelerate or DeepSpeed prepared."""
    preparing = {*preparations(tree), *tree.calls_to("deepspeed.initialize")}
    return {target for target, value, _ in tree.assigns if value in preparing}


def moves_to_device(tree: Tree, call: ast.AST) -> bool:
    """Whether a call is `….cuda()` or `….to(device)` with a device that is apparently neither a CPU nor meta."""
    if not is_method_call(call, "to", "cuda"):
        return False
    place = argument_at(call, 0, "device")
    return call.func.attr == "cuda" or (place is not None and _is_device(tree, place))


def _is_device(tree: Tree, node: ast.expr, depth: int = 3) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) or (isinstance(node.value, str) and node.value.startswith(("cuda", "xpu")))
    if isinstance(node, ast.JoinedStr):
        return isinstance(node.values[0], ast.Constant) and str(node.values[0].value).startswith(("cuda", "xpu"))
    if is_rank(tree, node):
        return True
    if isinstance(node, ast.Call):
        name = tree.called(node)
        if name == "torch.device" and node.args:
            return _is_device(tree, node.args[0], depth) or len(node.args) > 1
        return name.endswith(("cuda.current_device", "accelerator.current_accelerator"))
    if isinstance(node, ast.IfExp):  # "cuda:0" if there is one, else "cpu"
        return _is_device(tree, node.body, depth) or _is_device(tree, node.orelse, depth)
    if isinstance(node, ast.Name) and depth and (values := tree.values(node)):
        return any(_is_device(tree, value, depth - 1) for value in values)
    last = last_part(spelled(node)).lower()
    return last in ("device", "dev", "gpu", "gpu_id", "device_id") or last.endswith("_device")


def without_gradients(tree: Tree, node: ast.AST) -> bool:
    """Whether a node is within `with torch.no_grad():`, or in a function that is decorated so."""
    functions = (around for around in tree.ancestors(node) if isinstance(around, Function))
    decorators = [each for function in functions for each in function.decorator_list]
    names = (tree.called(each) or tree.dotted(each) for each in (*tree.contexts_of(node), *decorators))
    return any(last_part(name) in ("no_grad", "inference_mode") for name in names)


def backwards(tree: Tree, within: ast.AST | None = None) -> Iterator[tuple[MethodCall, ast.expr]]:
    """Each backward pass, and the loss of `loss.backward()` or `accelerator.backward(loss)`."""
    for call in tree.method_calls("backward", within=within):
        if spelled(call.func.value) not in ("torch.autograd", "autograd"):
            named = keyword(call, "loss") or next(iter(call.args), call.func.value)
            yield call, named if _is_engine(call.func.value) else call.func.value


def _is_engine(owner: ast.expr) -> bool:
    return bool(re.search(r"accelerator|fabric|engine|^self$|manager", spelled(owner)))


@kept
def averaging(tree: Tree) -> set[ast.Call]:
    """The backward passes in which the ranks surely average gradients, because a model is wrapped or prepared."""
    if tree.words & {"no_sync", "set_requires_gradient_sync", "require_backward_grad_sync", "process_group"}:
        return set()
    return {call for call, loss in backwards(tree) if _is_of_wrapped(tree, loss)}


def _is_of_wrapped(tree: Tree, value: ast.expr, depth: int = 4) -> bool:
    """Whether the gradients of a value surely reach a wrapped model."""
    parts = tree.walk(value)
    if not depth or _is_detached(tree, value):
        return False
    calls = (part for part in parts if isinstance(part, ast.Call))
    if any(tree.wrapping(call.func) or spelled(call.func) in prepared(tree) for call in calls):
        return not without_gradients(tree, value)
    for name in (part for part in parts if isinstance(part, ast.Name)):
        values = tree.values(name)
        first = [each for each in values if name.id not in tree.names_in(each)]  # not `loss = loss / 2`
        is_of_one = bool(first) and all(_is_of_wrapped(tree, each, depth - 1) for each in first)
        if is_of_one and not any(_is_detached(tree, each) for each in values):
            return True
    return False


def _is_detached(tree: Tree, value: ast.expr) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr in DETACHES for part in tree.walk(value))


def loss_divisions(
    tree: Tree, backward: MethodCall, loss: ast.expr, by: re.Pattern[str]
) -> Iterator[tuple[Placed, ast.expr]]:
    """(place, dividend) where a loss is divided by what has such a name: where its backward pass starts, or in an
    assignment before it in the same loop or function."""
    names = tree.spelled_in(loss)
    around = tree.loop_of(backward) or tree.function_of(backward)
    assigned = [(name, value, node) for name, value, node in tree.assigns if name in names and tree.is_in(node, around)]
    values = [loss, *(value for _, value, node in assigned if position(node) < position(backward))]
    parts = (part for value in values for part in _terms(value))
    divisions: list[ast.BinOp | ast.AugAssign] = [part for part in parts if isinstance(part, ast.BinOp)]
    for node in tree.nodes_in(around, ast.AugAssign):
        divisions += [node] if spelled(node.target) in names and position(node) < position(backward) else []
    for division in divisions:
        dividend, divisor = operands(division)
        name = spelled(divisor.func if isinstance(divisor, ast.Call) else divisor)
        if isinstance(division.op, ast.Div) and by.search(name):
            yield division, dividend


def _terms(node: ast.expr) -> Iterator[ast.expr]:
    """An expression and the terms and factors that it consists of, also in `scaler.scale(…)`."""
    yield node
    inner = operands(node) if isinstance(node, ast.BinOp) else node.args if is_method_call(node, "scale") else ()
    for part in inner:
        yield from _terms(part)


@kept
def averages_by_hand(tree: Tree, loop: ast.AST) -> bool:
    """Whether a training loop, or a function that it calls, combines tensors of the ranks that may be gradients or
    parameters, or leaves it to a hook."""
    if tree.words & GRADIENTS:
        return True
    combined = [call for call in tree.torch_calls(*COLLECTIVES) if tree.is_in(call, *reached_from(tree, loop))]
    return any(TENSORS.search(ast.unparse(part)) for call in combined for part in _context(tree, call))


def _context(tree: Tree, call: ast.Call) -> Iterator[ast.AST]:
    """What is combined, and what the loops around it run over."""
    yield from (part for argument in call.args for part in behind(tree, argument) if isinstance(part, ast.expr))
    yield from (loop.iter for loop in tree.loops_of(call) if isinstance(loop, ast.For))

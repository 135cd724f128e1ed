"""Checks the contract that a user's cell must fulfil to replace a cell of a script."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

from labkit.errors import ScriptError
from labkit.files import lines_of
from labkit.write.cells import Cell, has_main_guard
from labkit.write.compose import library

MODEL = "Model"  # is called without arguments, even if the library's Model has some
Function = ast.FunctionDef | ast.AsyncFunctionDef


def cell_of(obj: Any) -> tuple[str, str]:
    """`(text, origin)` of the whole cell that defined exactly this function or class.

    ipykernel stores every executed cell in `linecache` under the file name in its code objects, so a redefinition is
    never confused with an older one. `inspect.getsource` cannot do this for classes defined in a notebook
    (ipython/ipython#11249). For an object from a module it returns only the object's own source.
    """
    code = _code_of(obj)
    if code is None:
        if not inspect.isclass(obj) and _code_of(type(obj)) is not None:
            raise ScriptError(
                f"got an instance of {_name(type(obj))}; pass the class, which the script calls on every rank"
            )
        raise ScriptError(
            f"cannot find the cell that defined {_name(obj)}: expected a function, or a class that defines "
            "a method. Pass the cell's text instead"
        )
    name = code.co_filename
    if _is_notebook_cell(name):
        text = "".join(linecache.getlines(name))
        if not text:
            raise ScriptError(f"the cell that defined {_name(obj)} is no longer there; run it again, or pass its text")
        return text, _origin(text)
    try:
        return inspect.getsource(obj), f"{inspect.getsourcefile(obj)}:{code.co_firstlineno}"
    except (OSError, TypeError):
        raise ScriptError(
            f"cannot find the source of {_name(obj)}: a cell magic such as %%time hides it, and so does a plain Python "
            "prompt. Remove the magic, or pass the cell's text instead"
        ) from None


def import_of(obj: Any) -> str:
    """`from torchvision.models import resnet18`, for a function or class of an installed package; else ""."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "")
    if not callable(obj) or module in (None, "__main__") or not name.isidentifier():
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not _is_installed(Path(file)):
        return ""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):  # the shortest path to it is the public one
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), name, None) is obj:
            return f"from {package} import {name}"
    return ""


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts) or file.is_relative_to(
        sysconfig.get_path("stdlib")
    )


def _code_of(obj: Any) -> CodeType | None:
    if inspect.isclass(obj):
        for member in vars(obj).values():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            function = function.fget if isinstance(function, property) else function
            # Inherited or assigned functions were created elsewhere; a dataclass compiles its methods from a string.
            if inspect.isfunction(function) and function.__qualname__.startswith(obj.__qualname__ + "."):
                code: CodeType = inspect.unwrap(function).__code__
                if code.co_filename != "<string>":
                    return code
        return None
    return getattr(inspect.unwrap(obj), "__code__", None) if callable(obj) else None


def _is_notebook_cell(file_name: str) -> bool:
    # "/tmp/ipykernel_<pid>/<hash>.py" under ipykernel, "<ipython-input-…>" in a terminal.
    return "ipykernel_" in file_name or file_name.startswith("<ipython-input-")


def _origin(text: str) -> str:
    """`notebook cell In [3]`, as the notebook numbers the newest cell with this text."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    inputs = shell.user_ns.get("In", []) if shell else []
    numbers = [number for number, cell in enumerate(inputs) if cell.strip() == text.strip()]
    return f"notebook cell In [{numbers[-1]}]" if numbers else "a notebook cell"


def _name(obj: Any) -> str:
    return getattr(obj, "__qualname__", None) or f"a {type(obj).__name__}"


def as_cell(title: str, value: Any) -> Cell:
    """The Cell for a value that was passed for it: a Cell, its text, a live function or class. Raises ScriptError when
    it is not valid Python, or also runs code."""
    if isinstance(value, Cell):
        cell = replace(value, title=title, text=value.text if value.text.endswith("\n") else f"{value.text}\n")
    else:
        cell = _new_cell(title, value)
    cell.check_syntax()
    cell.check_only_defines()
    return cell


def _new_cell(title: str, value: Any) -> Cell:
    if isinstance(value, str):
        text, origin = value, "text passed to with_cells"
    elif statement := import_of(value):
        text = origin = statement
    else:
        text, origin = cell_of(value)
    if "\n# %%" in f"\n{text}":
        raise ScriptError(f"the text for the {title!r} cell contains a `# %%` line; pass one cell at a time")
    return Cell(title, text.strip("\n") + "\n\n\n", origin)


def with_definition(old: Cell, name: str, value: Any) -> Cell:
    """The old cell with its definitions of `name`, and of other names in `value`, replaced by those of `value`, which
    may also be a list, dict or number."""
    if isinstance(value, dict | list | tuple | int | float):
        value = f"{name} = {value!r}\n"
    new = aliased(Cell("", f"{name} = None"), as_cell(old.title, value), frozenset({name}), value)
    if name not in new.defines:
        raise ScriptError(f"{name}=… must define {_signature(old, name)}; {_yours(new)}")
    lines, places = lines_of(old.text), []
    for statement in {old.definitions[each] for each in new.defines & old.definitions.keys()}:
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        last = statement.end_lineno or first
        lines[first - 1 : last] = [""] * (last - first + 1)
        places.append(first - 1)
    lines[min(places)] = new.text.strip("\n") + "\n"  # above whatever is assigned from a definition that moved
    cell = replace(new, text="".join(lines))
    _check_parameters(old, cell, name, value)
    return cell


def aliased(old: Cell, new: Cell, needed: frozenset[str], value: Any) -> Cell:
    """The new cell with `Model = ResNet` appended, if only Model is needed from the old cell, and the class or function
    that was passed has another name."""
    name = getattr(value, "__name__", "")
    required = old.defines & needed
    if len(required) != 1 or required <= new.defines or name not in new.defines:
        return new
    return replace(new, text=f"{new.text.rstrip()}\n\n{next(iter(required))} = {name}\n\n\n")


def check_replacement(old: Cell, new: Cell, others: Sequence[Cell], value: Any = None) -> None:
    """Raise ScriptError when the new cell lacks names that the others use from the old one, or defines them with other
    parameters than the others pass. `value` is the live object that the cell came from."""
    needed = old.defines & frozenset().union(*(cell.uses for cell in others))
    missing = sorted(needed - new.defines - frozenset().union(*(cell.defines for cell in others)))
    if missing:
        names = ", ".join(_signature(old, name) for name in missing)
        alone, own = sorted(needed & new.defines), sorted(new.definitions)
        hint = f". To replace {alone[0]} alone, pass with_cells({alone[0]}=…)" if alone else ""
        if len(missing) == len(own) == 1:
            hint = f". End it with `{missing[0]} = {own[0]}`"
        raise ScriptError(f"the {new.title!r} cell must define {names}; {_yours(new)}{hint}")
    if has_main_guard(old.text) and not has_main_guard(new.text):
        raise ScriptError(
            f'the {new.title!r} cell must end with `if __name__ == "__main__": main()`, or the script does '
            "nothing; pass its text, because running such a cell in a notebook would start it"
        )
    for name in sorted(needed & new.defines):
        _check_parameters(old, new, name, value)


def _yours(cell: Cell) -> str:
    names = sorted(name for name in cell.defines - set(cell.imports) if not name.startswith("_"))
    return f"yours defines {', '.join(names) or 'nothing'}"


def _signature(cell: Cell, name: str) -> str:
    """`lr_factor(step, total_steps, args)`"""
    parameters = _parameters(cell, name)
    if name == MODEL:
        return f"{name}()"
    return name if parameters is None else f"{name}({ast.unparse(parameters)})"


def _parameters(cell: Cell, name: str) -> ast.arguments | None:
    """The parameters of a function, or of a class's own __init__ without self."""
    statement = cell.definitions.get(name)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
        return _parameters(cell, statement.value.id) if statement.value.id != name else None
    if isinstance(statement, ast.ClassDef):
        constructors = [each for each in statement.body if isinstance(each, Function) and each.name == "__init__"]
        if not constructors:
            return None
        own = constructors[0].args
        return ast.arguments(**{**dict(ast.iter_fields(own)), "args": own.args[1:]})
    if isinstance(statement, Function) and not statement.decorator_list:
        return statement.args
    return None


def _check_parameters(old: Cell, new: Cell, name: str, value: Any) -> None:
    expected, own = _parameters(old, name), _parameters(new, name)
    is_imported = own is None and getattr(value, "__name__", None) in new.imports
    if is_imported:
        own = _parameters_of(value)
    if expected is None or own is None:
        return
    if is_imported and name != MODEL:
        _check_options(new, _signature(old, name), expected, own, value)
    needs, takes = _counts(own)
    least, most = (0, 0) if name == MODEL else _counts(expected)
    if takes < least or needs > most:
        how = f"as {_signature(old, name)}" if most else "without arguments"
        raise ScriptError(
            f"the {new.title!r} cell: {name} is called {how}, but yours is {name}({ast.unparse(own)}). "
            "Change its parameters, or pass a function with these parameters that calls it"
        )


def _check_options(cell: Cell, call: str, expected: ast.arguments, own: ast.arguments, value: Any) -> None:
    """Refuse imported objects that do not take the script's options: `torch.optim.Adam` takes a learning rate there."""
    for ours, theirs in zip(expected.args, own.args, strict=False):
        if ours.arg == "args" != theirs.arg:
            raise ScriptError(
                f"the {cell.title!r} cell is called as {call}, where args are the script's options; "
                f"{value.__name__} takes {theirs.arg} there. Pass a function with these parameters that calls it"
            )


def _counts(parameters: ast.arguments) -> tuple[float, float]:
    """How many arguments are required, and how many are accepted by position."""
    places = [*parameters.posonlyargs, *parameters.args]
    keywords = [default for default in parameters.kw_defaults if default is None]
    return len(places) - len(parameters.defaults) + len(keywords), math.inf if parameters.vararg else len(places)


def _parameters_of(value: Any) -> ast.arguments | None:
    """The parameters of a live function or class, without annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    function = ast.parse(f"def f{text}: pass").body[0]
    return function.args if isinstance(function, Function) else None


def check_names(cell: Cell, head: Cell, cells: Sequence[Cell]) -> None:
    """Raise ScriptError when the cell uses a name that no cell defines. A user's own cell must also import what it
    uses, and must not define names that another cell defines."""
    others = [other for other in cells if other is not cell]
    everywhere = head.defines.union(*(other.defines for other in others))
    if unknown := sorted(cell.uses - everywhere):
        advice = (
            "Move these lines to a separate cell" if "labkit" in unknown else "Define or import it in the same cell"
        )
        if library().owners(cell) and (known := library().definition(unknown[0])):
            advice = f"Define {_signature(known, unknown[0])} in a cell of yours"
        raise ScriptError(
            f"the {cell.title!r} cell uses {', '.join(unknown)}, which no cell of the script defines. {advice}"
        )
    library_cells = [other for other in others if other.defines and not other.origin]
    if not cell.origin or not library_cells:
        return
    defined = head.defines.union(*(other.defines - set(other.imports) for other in others))
    imported = {name: line for other in others for name, line in other.imports.items()}
    if borrowed := sorted(cell.uses - defined):
        raise ScriptError(
            f"the {cell.title!r} cell uses {', '.join(borrowed)} without importing {'them' if borrowed[1:] else 'it'}: "
            "each cell must have its own imports, because the others may be replaced. Add "
            + "; ".join(f"`{imported[name].statement}`" for name in borrowed)
        )
    if not library().owners(cell):
        for other in library_cells:
            _check_clash(cell, other, is_later=cells.index(cell) > cells.index(other))


def _check_clash(cell: Cell, other: Cell, *, is_later: bool) -> None:
    """Raise ScriptError if both define a name, unless cells with this title are meant to replace a default."""
    intended = library().names_of(cell.title) if is_later else frozenset()
    clash = sorted(name for name in cell.defines & other.defines - intended if not _same_import(cell, other, name))
    if clash:
        raise ScriptError(
            f"the {cell.title!r} cell and the script's {other.title!r} cell both define {', '.join(clash)}, and the "
            f"later one would replace the earlier; rename yours, or pass the {other.title!r} cell as well"
        )


def _same_import(cell: Cell, other: Cell, name: str) -> bool:
    mine, theirs = cell.imports.get(name), other.imports.get(name)
    return mine is not None and theirs is not None and mine.target == theirs.target

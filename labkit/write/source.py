"""Finds the text of the notebook cell that created a live object."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any

from labkit.errors import ScriptError

__all__ = ["cell_of", "import_of"]


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

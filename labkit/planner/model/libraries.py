"""Imports what a script imports once for all children of question_server.py: it takes longer than most answers."""

from __future__ import annotations

import ast
import gc
import sys
from contextlib import suppress
from pathlib import Path

NAMES = {"accelerate", "datasets", "diffusers", "peft", "timm", "torchvision", "transformers"}


def import_for(text: str, folder: Path) -> None:
    """Execute the script's imports of these libraries, unless modules in its folder have the same names. A child tells
    of those that fail, when the script itself imports them."""
    if any((folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists() for name in NAMES):
        return
    try:
        statements = [each for each in ast.parse(text).body if (names := _imported(each)) and names <= NAMES]
    except (SyntaxError, ValueError):
        return
    if any(name in text for name in ("AutoModel", "PreTrainedModel")):  # every model of transformers imports it
        statements.append(ast.parse("import transformers.modeling_utils").body[0])
    before = len(sys.modules)
    gc.disable()
    for statement in statements:
        with suppress(Exception, SystemExit):
            exec(compile(ast.Module([statement], []), "<imports>", "exec"), {})
    gc.enable()
    if len(sys.modules) > before:
        gc.freeze()


def _imported(statement: ast.stmt) -> set[str]:
    """The names of the packages that a statement imports."""
    match statement:
        case ast.Import(names=names):
            return {alias.name.partition(".")[0] for alias in names}
        case ast.ImportFrom(module=str(module), level=0):
            return {module.partition(".")[0]}
    return set()

"""Decides which ranks may be forks of a process that has imported torch: those of scripts that cannot tell.

A fork differs from a new process in what happened before its first line: torch has been imported, in the environment
and with the settings of that moment, Python's memory has a history, and the ranks share a hash seed. So nothing that a
script does before it imports torch may matter to torch, and nothing in it may look at what differs. The script and the
modules next to it are read, never run; what cannot be told from reading is a reason for new processes.
"""

from __future__ import annotations

import ast
import os
import site
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from zipfile import is_zipfile

# Variables that libraries of torch read when they are loaded, before a fork.
READ_WHEN_LOADED = ("GOMP_", "KMP_", "MALLOC_", "MKL_", "NPY_", "OMP_", "OPENBLAS_", "GLIBC_")
NOT_READ = (
    "OMP_NUM_THREADS",  # applied in each fork
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # set by scikit-learn, for an OpenMP that torch does not use
    *("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),  # the process that is forked has the same, see session.py
)
# Packages that behave the same whether torch is imported before or after them. Others may not.
PACKAGES = {
    *("PIL", "accelerate", "albumentations", "bitsandbytes", "cv2", "datasets", "deepspeed", "diffusers", "einops"),
    *("evaluate", "huggingface_hub", "lightning", "matplotlib", "numpy", "omegaconf", "pandas", "peft", "pyarrow"),
    *("labkit", "pytorch_lightning", "safetensors", "schedulefree", "scipy", "sentencepiece", "skimage", "sklearn"),
    *("tensorboard", "tensorboardX", "tiktoken", "timm", "tokenizers", "torch", "torchao", "torchaudio", "torchdata"),
    *("torchmetrics", "torchvision", "tqdm", "trackio", "transformers", "trl", "wandb", "yaml"),
}
WITH_TORCH = {"torch", "accelerate", "lightning", "pytorch_lightning", "timm", "torchvision", "transformers", "trl"}
# Modules that look at what differs, or run code by its name, and the names in them that do neither.
TELLING: dict[str, set[str]] = {
    "gc": {"collect", "disable", "enable", "isenabled"},
    "importlib": {"metadata", "resources"},
    "resource": {f"RLIMIT_{what}" for what in ("AS", "MEMLOCK", "NOFILE", "STACK")}
    | {"RLIM_INFINITY", "getrlimit", "setrlimit"},
    **dict.fromkeys(("modulefinder", "pkgutil", "psutil", "runpy", "tracemalloc"), set()),
}
TELLING_NAMES = {
    "sys": {"getallocatedblocks", "meta_path", "modules", "orig_argv", "path_hooks", "path_importer_cache"},
    "logging": {"config"},  # which disables the loggers that exist
    "os": {"putenv", "sched_setaffinity", "unsetenv"}
    | {f"exec{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")},
}
RUNS_TEXT = {"__import__", "compile", "eval", "exec"}
READS = {"copy", "get", "items", "keys", "values"}  # methods of os.environ that change nothing
# Variables that are not read by any import.
HARMLESS_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "GLOO_", "HF_", "MASTER_", "NCCL_", "TOKENIZERS_PARALLELISM"),
    *("TRANSFORMERS_", "WANDB_"),
)
# Modules of torch.distributed that a fork has, and that `import torch` does not load.
NOT_LOADED = {"_composable", "_functional_collectives", "_shard", "_symmetric_memory", "elastic", "fsdp", "launcher"}
NOT_LOADED |= {"argparse_util", "nn", "run", "tensor"}
MOST_MODULES = 200
LABKITS = Path(__file__).parents[3]  # the folder that has labkit


def why_new_processes(program: Sequence[str], text: str, folder: Path, environment: Mapping[str, str]) -> str | None:
    """Why ranks of this program are new processes; None if they may be forks. `text` is the script's, `folder` where
    its own modules are, `environment` the ranks'."""
    if program[0] == "-m" or Path(program[0]).is_dir() or is_zipfile(program[0]):
        return "Python finds the module itself"
    for name in environment:
        if name.startswith(READ_WHEN_LOADED) and name not in NOT_READ:
            return f"{name} is read when torch is imported"
    threads = environment.get("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or not int(threads):
        return f"OMP_NUM_THREADS is {threads!r}"
    startup = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if any(PathFinder.find_spec(name, startup) for name in ("sitecustomize", "usercustomize")):
        return "PYTHONPATH has a module that runs when Python starts"
    if hidden := hidden_module(folder):
        return f"{hidden} next to the script has the name of another module"
    reader = _Reader(folder)
    try:
        return reader.reason(text) or (None if reader.has_torch else "the script does not import torch at its top")
    except (SyntaxError, ValueError, RecursionError, OSError):
        return "the script cannot be read"


def hidden_module(folder: Path) -> str | None:
    """A module next to the script instead of which a fork may have loaded another one of the same name."""
    elsewhere = [*site.getsitepackages(), site.getusersitepackages(), str(LABKITS)]
    try:
        beside = {path.name.partition(".")[0] for path in folder.iterdir()}
    except OSError:
        return None
    for name in sorted(beside):
        own = PathFinder.find_spec(name, [str(folder)]) if name.isidentifier() else None
        if own is None or own.origin is None:  # a folder is a module only where there is no other
            continue
        other = PathFinder.find_spec(name, elsewhere)
        if name in sys.stdlib_module_names or (other is not None and other.origin not in (None, own.origin)):
            return Path(own.origin).name if not own.submodule_search_locations else name
    return None


class _Reader:
    """Reads a script and its own modules in the order in which Python would run them."""

    def __init__(self, folder: Path) -> None:
        self.has_torch = False
        self._folder = folder
        self._read: set[Path] = set()

    def reason(self, text: str | bytes) -> str | None:
        """Why this module can tell a fork from a new process; None if it cannot."""
        tree = ast.parse(text)
        return _telling(tree) or self._of_statements(tree.body)

    def _of_statements(self, statements: Sequence[ast.stmt]) -> str | None:
        for statement in statements:
            if reason := self._of_statement(statement):
                return reason
        return None

    def _of_statement(self, statement: ast.stmt) -> str | None:
        if isinstance(statement, ast.Try | ast.TryStar):  # such as a package that may be missing
            handlers = [s for handler in statement.handlers for s in handler.body]
            return self._of_statements([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._of_import(statement)
        had_torch = self.has_torch
        if isinstance(statement, ast.If) and not _calls(statement.test):  # such as TYPE_CHECKING
            reason = self._of_statements([*statement.body, *statement.orelse])
        elif not (had_torch or _does_nothing(statement)):
            reason = f"line {statement.lineno} runs before torch is imported"
        else:
            inner = (node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom))
            reason = next(filter(None, map(self._of_import, inner)), None)
        self.has_torch = had_torch  # what is in a branch or in a function may never run, or later
        return reason

    def _of_import(self, statement: ast.Import | ast.ImportFrom) -> str | None:
        for module in _imported(statement):
            package = module.partition(".")[0]
            if package in WITH_TORCH:
                self.has_torch = True
            elif package in sys.stdlib_module_names or package in PACKAGES:
                continue
            elif (spec := PathFinder.find_spec(package, [str(self._folder)])) is None:
                return f"{package} may behave differently once torch is imported"
            else:
                places = [spec.origin] if spec.origin else []
                places += [str(path) for folder in spec.submodule_search_locations or () for path in _files(folder)]
                if reason := next(filter(None, map(self._of_file, map(Path, places))), None):
                    return f"{package}: {reason}"
        return None

    def _of_file(self, path: Path) -> str | None:
        if path in self._read:
            return None
        self._read.add(path)
        if path.suffix != ".py" or len(self._read) > MOST_MODULES:
            return f"{path.name} is not read"
        return self.reason(path.read_bytes())


def _files(folder: str) -> Iterator[Path]:
    yield from sorted(Path(folder).rglob("*.py"))


def _imported(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module] if statement.module and not statement.level else []  # its own package is read as a whole


def _does_nothing(statement: ast.stmt) -> bool:
    """Whether a statement only defines names."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return not statement.decorator_list and not _calls(statement.args)
    if isinstance(statement, ast.ClassDef):
        runs = bool(statement.decorator_list) or any(map(_calls, [*statement.bases, *statement.keywords]))
        return not runs and all(map(_does_nothing, statement.body))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(map(_is_name, targets)) and (statement.value is None or not _calls(statement.value))
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and not _calls(statement.value))


def _is_name(target: ast.expr) -> bool:
    """Whether an assignment only defines names, or a variable of the environment, of which `_telling` allows some."""
    if isinstance(target, ast.Subscript):
        return _is_environment(target.value)
    parts = ast.Name | ast.Tuple | ast.List | ast.Starred | ast.expr_context
    return all(isinstance(node, parts) for node in ast.walk(target))


def _calls(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _telling(tree: ast.Module) -> str | None:
    """What in a module's code tells a fork from a new process, or may do so."""
    understood: set[ast.AST] = set()  # names of modules, and of os.environ, whose use is harmless
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    loaded = {f"{module}." for node in imports for module in [*_imported(node), *_imported_names(node)]}
    absent = {name for name in NOT_LOADED if not any(m.startswith(f"torch.distributed.{name}.") for m in loaded)}
    for node in ast.walk(tree):  # parents before their children
        if found := _found(node, understood):
            return f"line {getattr(node, 'lineno', 0)} {found}"
        if isinstance(node, ast.Attribute) and node.attr in absent and _is_distributed(node.value):
            return f"line {node.lineno} uses torch.distributed.{node.attr} without importing it"
    return None


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def _is_distributed(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("dist", "distributed")


def _found(node: ast.AST, understood: set[ast.AST]) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return _found_import(node)
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and (module := node.value.id) in {**TELLING, **TELLING_NAMES}:
            understood.add(node.value)
            name = node.attr
            if name in TELLING_NAMES.get(module, ()) or name not in TELLING.get(module, {name}):
                return f"uses {module}.{name}"
        if _is_environment(node.value) and node.attr in READS:
            understood.add(node.value)
    elif isinstance(node, ast.Subscript) and _is_environment(node.value):
        if isinstance(node.ctx, ast.Load) or _is_harmless(node.slice):
            understood.add(node.value)
    elif isinstance(node, ast.Compare):
        understood.update(node.comparators)
    elif isinstance(node, ast.Dict):
        understood.update(value for key, value in zip(node.keys, node.values, strict=True) if key is None)
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT:
            return f"calls {node.func.id}()"
        understood.update(keyword.value for keyword in node.keywords if keyword.arg is None)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault" and _is_harmless(*node.args[:1]):
            understood.add(node.func.value)
    elif isinstance(node, ast.Constant) and ("relativeCreated" in str(node.value) or str(node.value)[:6] == "/proc/"):
        return "asks for the process's history"
    if _is_environment(node) and node not in understood:
        return "may change os.environ"
    if isinstance(node, ast.Name) and node.id in {**TELLING, **TELLING_NAMES} and node not in understood:
        return f"passes {node.id} on"
    return None


def _found_import(node: ast.Import | ast.ImportFrom) -> str | None:
    if isinstance(node, ast.ImportFrom):
        package, _, inner = (node.module or "").partition(".")
        names = {inner.partition(".")[0]} if inner else {alias.name for alias in node.names}
        is_telling = not names <= TELLING.get(package, names) or names & {*TELLING_NAMES.get(package, ())}
        return f"imports {', '.join(sorted(names))} of {package}" if is_telling and not node.level else None
    for alias in node.names:
        package, _, inner = alias.name.partition(".")
        harmless = TELLING.get(package)
        if harmless is not None and (inner.partition(".")[0] not in harmless if inner else not harmless):
            return f"imports {alias.name}"
        if package in {**TELLING, **TELLING_NAMES} and alias.asname:
            return f"imports {alias.name} under another name"
    return None


def _is_environment(node: ast.AST) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "environ"


def _is_harmless(name: ast.expr) -> bool:
    return isinstance(name, ast.Constant) and str(name.value).startswith(HARMLESS_VARIABLES)

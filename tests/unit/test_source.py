import importlib.util
import linecache
import sys

import pytest

from labkit.errors import ScriptError
from labkit.write import Script
from labkit.write.contract import cell_of, import_of


@pytest.fixture
def run(shell):
    def run_cell(text, name):
        shell.run_cell(text, store_history=True).raise_error()
        return shell.user_ns[name]

    return run_cell


@pytest.mark.parametrize(
    "body",
    [
        "    def method(self):\n        return 1\n",
        "    x = 1\n\n    def method(self):\n        return 1\n",
        "    @staticmethod\n    def method():\n        return 1\n",
        "    @classmethod\n    def method(cls):\n        return 1\n",
        "    @property\n    def value(self):\n        return 1\n",
        "    method = lambda self: 1\n",
        "    async def method(self):\n        return 1\n",
    ],
    ids=["method", "late method", "staticmethod", "classmethod", "property", "lambda", "async"],
)
def test_a_class_is_traced_to_the_whole_cell_that_defined_it(run, body):
    text = f"import math\nclass Model:\n{body}after = 2\n"

    assert cell_of(run(text, "Model"))[0] == text


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return 1\n",
        "async def f():\n    return 1\n",
        "f = lambda: 1\n",
        "import functools\n@functools.lru_cache\ndef f():\n    return 1\n",
        "import functools\ndef passing(g):\n    return functools.wraps(g)(lambda *a: g(*a))\n"
        "@passing\ndef f():\n    return 1\n",
    ],
    ids=["function", "async", "lambda", "lru_cache", "wraps"],
)
def test_a_function_is_traced_to_the_whole_cell_that_defined_it(run, text):
    assert cell_of(run(text, "f"))[0] == text


def test_a_method_decorated_elsewhere_still_leads_to_the_class_cell(run):
    run("import functools\ndef passing(g):\n    return functools.wraps(g)(lambda *a: g(*a))\n", "passing")
    text = "class Model:\n    @passing\n    def method(self):\n        return 1\n"

    assert cell_of(run(text, "Model"))[0] == text


def test_a_redefinition_gives_the_newer_text_and_the_older_object_its_own(run):
    first = "class Model:\n    def method(self):\n        return 1\n"
    second = first.replace("1", "2")

    older, newer = run(first, "Model"), run(second, "Model")

    assert cell_of(newer)[0] == second
    assert cell_of(older)[0] == first


def test_the_origin_is_the_cells_number(run, shell):
    function = run("def f():\n    return 'numbered'\n", "f")

    assert cell_of(function)[1] == f"notebook cell In [{shell.execution_count - 1}]"


@pytest.mark.parametrize("text", ["class Empty:\n    x = 1\n", "class Empty(dict):\n    pass\n"])
def test_a_class_without_a_method_of_its_own_is_refused(run, text):
    with pytest.raises(ScriptError, match=r"cell that defined Empty: .*a class that defines a method.*cell's text"):
        cell_of(run(text, "Empty"))


def test_a_borrowed_method_does_not_stand_for_the_class(run):
    run("class Base:\n    def method(self):\n        return 1\n", "Base")

    with pytest.raises(ScriptError, match="a class that defines a method"):
        cell_of(run("class Model(Base):\n    method = Base.method\n", "Model"))


def test_a_dataclass_without_a_method_of_its_own_is_refused_as_such(run):
    config = run("from dataclasses import dataclass\n@dataclass\nclass Config:\n    x: int = 1\n", "Config")

    with pytest.raises(ScriptError, match="a class that defines a method"):
        cell_of(config)


def test_a_function_made_by_exec_has_no_source():
    names = {}
    exec("def typed():\n    return 1\n", names)

    with pytest.raises(ScriptError, match="cannot find the source of typed"):
        cell_of(names["typed"])


@pytest.mark.parametrize("value", [3, None, len, [1]])
def test_what_is_no_function_and_no_class_is_refused(value):
    with pytest.raises(ScriptError, match="Pass the cell's text instead"):
        cell_of(value)


@pytest.fixture
def kernel_function(tmp_path):
    """A function as ipykernel compiles it, and the name its cell has in linecache."""
    name, text = str(tmp_path / "ipykernel_123" / "456.py"), "x = 1\ndef f():\n    return x\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {}
    exec(compile(text, name, "exec"), names)
    yield names["f"], name, text
    linecache.cache.pop(name, None)


def test_a_cell_of_ipykernel_is_found_by_its_file_name(kernel_function):
    function, _, text = kernel_function

    assert cell_of(function) == (text, "a notebook cell")


def test_a_cell_that_is_gone_is_said_to_be_gone(kernel_function):
    function, name, _ = kernel_function
    del linecache.cache[name]

    with pytest.raises(ScriptError, match="the cell that defined f is no longer there; run it again, or pass its text"):
        cell_of(function)


def test_an_object_of_a_module_gives_its_own_source_alone(tmp_path):
    path = tmp_path / "ordinary.py"
    path.write_text(
        "import os\n\n\ndef f():\n    return os\n\n\nclass Model:\n    def method(self):\n        return f\n"
    )
    spec = importlib.util.spec_from_file_location("ordinary", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ordinary"] = module
    spec.loader.exec_module(module)

    assert cell_of(module.f) == ("def f():\n    return os\n", f"{path}:4")
    assert cell_of(module.Model)[0] == "class Model:\n    def method(self):\n        return f\n"
    del sys.modules["ordinary"]


def test_a_class_of_a_notebook_is_the_model_whatever_it_is_called(run):
    text = "from torch import nn\n\nWIDTH = 3\n\nclass ResNet(nn.Linear):\n"
    text += "    def __init__(self):\n        super().__init__(WIDTH, 1)\n"

    script = Script.load("ddp").with_cells(model=run(text, "ResNet"))

    assert script.cells["model"].text == f"{text}\nModel = ResNet\n\n\n"
    assert script.cells["model"].origin.startswith("notebook cell In [")


def test_a_notebook_cell_that_leans_on_another_for_its_imports_is_refused(run):
    run("from torch import nn\n", "nn")
    model = run("class ResNet(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 1)\n", "ResNet")

    with pytest.raises(ScriptError, match="uses nn without importing it: .* Add `from torch import nn`"):
        Script.load("ddp").with_cells(model=model)


def test_what_an_installed_package_offers_is_imported_by_its_public_name():
    from pandas import DataFrame
    from torch.nn import Linear
    from torch.nn.functional import cross_entropy

    assert import_of(Linear) == "from torch.nn import Linear"
    assert import_of(cross_entropy) == "from torch.nn.functional import cross_entropy"
    assert import_of(DataFrame) == "from pandas import DataFrame"


@pytest.mark.parametrize("value", [len, 3, None, "text", lambda: 1, [].append], ids=lambda v: type(v).__name__)
def test_what_is_of_no_installed_package_is_not_imported(value):
    assert import_of(value) == ""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ScriptError
from labkit.write import Cell


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import os", {"os"}),
        ("import os.path", {"os"}),
        ("import os.path as p", {"p"}),
        ("from a import b, c as d", {"b", "d"}),
        ("x = y = 1", {"x", "y"}),
        ("x: int = 1", {"x"}),
        ("x += 1", {"x"}),
        ("a, (b, *c) = z", {"a", "b", "c"}),
        ("a.b = a[0] = 1", set()),
        ("def f(p, *args, q=1, **kwargs):\n    local = p", {"f"}),
        ("async def f():\n    pass", {"f"}),
        ("class A:\n    inner = 1\n    def method(self):\n        pass", {"A"}),
        ("def f():\n    def g():\n        pass", {"f"}),
        ("def f():\n    global g\n    g = 1", {"f", "g"}),
        ("def f():\n    def h():\n        global g\n        g = 1", {"f", "g"}),
        ("def f():\n    x = 1\n    def h():\n        nonlocal x\n        x = 2", {"f"}),
        pytest.param("[i for i in z]", set()),
        pytest.param("[last := i for i in z]", {"last"}),
        ("(n := 3)", {"n"}),
        ("for i, j in z:\n    k = i", {"i", "j", "k"}),
        ("with open(p) as (a, b):\n    pass", {"a", "b"}),
        ("if c:\n    x = 1\nelse:\n    y = 1", {"x", "y"}),
        ("try:\n    import a\nexcept ImportError:\n    a = None", {"a"}),
        ("match z:\n    case {'k': v, **rest}:\n        pass", {"v", "rest"}),
        ("f = lambda x: x", {"f"}),
        ("", set()),
    ],
)
def test_a_cell_defines_what_its_top_level_binds(text, names):
    assert Cell("model", text).defines == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = y + z.attribute[k]", {"y", "z", "k"}),
        ("def f(a):\n    b = a\n    return b + c", {"c"}),
        ("def f():\n    return later\nlater = 1", set()),
        ("def f():\n    def g():\n        return outer + h\n    outer = 1", {"h"}),
        ("def f():\n    global g\n    return g", {"g"}),
        ("def f():\n    global g\n    g = 1\ndef h():\n    return g", set()),
        ("class A(B, metaclass=M):\n    c = d\n    def m(self):\n        return c", {"B", "M", "d", "c"}),
        ("class A:\n    def m(self):\n        return super().m() + A.x", set()),
        ("[i + k for i in z if i]", {"k", "z"}),
        ("{k: v for k, v in z}", {"z"}),
        ("x = [[c for c in r] for r in z]", {"z"}),
        ("f = lambda a, b=d: a + b + e", {"d", "e"}),
        ("@decorator(argument)\ndef f():\n    pass", {"decorator", "argument"}),
        ("@decorator\nclass A:\n    pass", {"decorator"}),
        ("def f(a: T, *args: U, b=d) -> R:\n    pass", {"T", "U", "R", "d"}),
        ("x: T = 1", {"T"}),
        ("def f(*args, **kwargs):\n    return g(*args, **kwargs)", {"g"}),
        ("a, *b = c", {"c"}),
        ("x += 1", set()),
        ("try:\n    import a\nexcept ImportError:\n    a = None\nb = a.c", set()),
        ("try:\n    x = f()\nexcept E as error:\n    x = error", {"f", "E"}),
        ("x = f'{a} {b!r:>{w}}'", {"a", "b", "w"}),
        ("x = len(range(3)), __name__, __file__, __doc__, print", set()),
        ("import a.b\nx = a.b.c", set()),
        ("", set()),
    ],
)
def test_a_cell_uses_the_globals_it_neither_defines_nor_finds_built_in(text, names):
    assert Cell("model", text).uses == names


def test_a_syntax_error_names_the_cell_and_its_own_line():
    with pytest.raises(ScriptError, match=r"the 'model' cell has a syntax error at line 3: y = = 2: invalid syntax"):
        Cell("model", "import os\n\ny = = 2\n").check_syntax()


@pytest.mark.parametrize("line", ["%matplotlib inline", "%%time", "!pip install x", "    !ls"])
def test_a_notebook_magic_is_called_by_its_name(line):
    with pytest.raises(ScriptError, match=r"at line 1: .*notebook magics cannot go into a script"):
        Cell("model", f"{line}\nx = 1\n").check_syntax()


def test_an_ordinary_syntax_error_says_nothing_of_magics():
    with pytest.raises(ScriptError) as caught:
        Cell("model", "x = 5 % % 3\n").check_syntax()

    assert "magic" not in str(caught.value)


def test_a_nul_byte_in_a_cell_is_a_script_error():
    with pytest.raises(ScriptError, match="'model' cell"):
        Cell("model", "x = '\0'\n").check_syntax()


@pytest.mark.parametrize("text", ["", "x = 1", "async def f():\n    await g()\n", "# only a comment\n"])
def test_python_passes_the_syntax_check(text):
    Cell("model", text).check_syntax()


@given(st.text())
def test_any_text_is_either_a_cell_or_a_script_error(text):
    cell = Cell("model", text)
    try:
        cell.check_syntax()
        cell.check_only_defines()
    except ScriptError:
        return

    assert not cell.defines & cell.uses


@pytest.mark.parametrize(
    "text",
    [
        "import os\nfrom a import b\n",
        "x = f()\ny: int = 1\nx += 1\n",
        "def f():\n    print(1)\n\n\nasync def g():\n    pass\n\n\nclass A:\n    print(1)\n",
        '"""A docstring."""\n',
        "pass\n",
        "try:\n    import a\nexcept ImportError:\n    a = None\nelse:\n    b = a\nfinally:\n    c = 1\n",
        "if version > 2:\n    def f(): ...\nelif version:\n    f = None\nelse:\n    import f\n",
        'def main():\n    pass\n\n\nif __name__ == "__main__":\n    main()\n',
        "",
    ],
)
def test_a_cell_may_import_assign_define_and_guard_its_main(text):
    Cell("model", text).check_only_defines()


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("x = 1\nprint(x)\n", 2, "print(x)"),
        ("model(\n    1,\n)\n", 1, "model("),
        ("for i in range(3):\n    x = i\n", 1, "for i in range(3):"),
        ("while x:\n    x -= 1\n", 1, "while x:"),
        ("with a:\n    x = 1\n", 1, "with a:"),
        ("if debug:\n    x = 1\n    print(x)\n", 3, "print(x)"),
        ("try:\n    import a\nexcept ImportError:\n    install('a')\n", 4, "install('a')"),
        ("del x\n", 1, "del x"),
        ("assert x\n", 1, "assert x"),
    ],
)
def test_a_cell_that_acts_is_refused_with_the_line_that_does(text, line, shown):
    with pytest.raises(ScriptError) as caught:
        Cell("model", text).check_only_defines()

    first = str(caught.value).splitlines()[0]
    assert first == f"the 'model' cell also runs code at line {line}: {shown}"
    assert "move this line to a separate cell" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "statement", "target"),
    [
        ("import torch", "torch", "import torch", "torch"),
        ("import torch.nn", "torch", "import torch.nn", "torch"),
        ("import torch.nn as nn", "nn", "import torch.nn as nn", "torch.nn"),
        ("from torch import nn, optim", "nn", "from torch import nn", "torch.nn"),
        ("from torch.nn import functional as F", "F", "from torch.nn import functional as F", "torch.nn.functional"),
        ("from . import sibling", "sibling", "from . import sibling", "..sibling"),
        ("try:\n    import fast\nexcept ImportError:\n    import slow as fast", "fast", "import slow as fast", "slow"),
    ],
)
def test_an_import_is_known_by_its_statement_and_by_what_it_stands_for(text, name, statement, target):
    found = Cell("x", text).imports[name]

    assert (found.statement, found.target) == (statement, target)


def test_a_name_that_is_also_defined_is_not_only_imported():
    cell = Cell("x", "from a import f, g\n\n\ndef f():\n    import inside\n\n\nx: int = 1\ny = z = 2\n")

    assert set(cell.imports) == {"g"}
    assert set(cell.definitions) == {"f", "x"}

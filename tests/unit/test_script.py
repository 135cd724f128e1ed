import ast
import contextlib
import importlib.util
import io
import os
import socket
import subprocess
import sys
import tokenize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ScriptError
from labkit.write import Cell, Script, script_names

TEXT = '''"""A script of two cells."""

# %% model
import math


def area(radius):
    return math.pi * radius**2


# %% main
def main():
    print(area(2))


if __name__ == "__main__":
    main()
'''


def bind(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NEW_MODEL = "def area(radius):\n    return 3 * radius**2\n"

code_lines = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20)
title_lines = st.from_regex(r"# %%( [a-z\[\]-]+)*", fullmatch=True)
canonical_texts = st.lists(title_lines | code_lines.filter(lambda line: not line.startswith("# %%")), max_size=8).map(
    lambda lines: "".join(f"{line}\n" for line in lines)
)
texts = st.lists(title_lines | code_lines | code_lines.map("# %%".__add__), max_size=8).map("\n".join)


def ends_in_space(script):
    return any(cell.title != cell.title.rstrip() for cell in script.parts)


@pytest.fixture
def script():
    return Script.parse(TEXT, name="demo")


@pytest.fixture
def load_module(tmp_path):
    def load(text):
        path = tmp_path / "written_beside.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@given(canonical_texts)
def test_a_parsed_text_is_written_back_as_it_was(text):
    assert str(Script.parse(text)) == text


@given(texts)
def test_a_written_script_parses_to_itself(text):
    script = Script.parse(text)
    if not ends_in_space(script):
        assert Script.parse(str(script)) == script


@pytest.mark.parametrize("text", ["# %% model \nx = 1\n", "# %% model\t\nx = 1\n"])
def test_a_space_after_a_title_changes_neither_the_title_nor_the_round_trip(text):
    script = Script.parse(text)

    assert Script.parse(str(script)) == script
    assert list(script.cells) == ["model"]


def test_a_script_is_its_head_and_its_titled_cells(script):
    assert script.head == '"""A script of two cells."""\n\n'
    assert list(script.cells) == ["model", "main"]
    assert script.cells["main"].text.startswith("def main():\n")


def test_text_without_titles_is_a_script_without_cells():
    script = Script.parse("print(1)\n")

    assert (script.head, script.parts) == ("print(1)\n", ())


def test_untitled_cells_are_kept_and_not_listed():
    script = Script.parse("# %%\nx = 1\n# %% model\ny = 1\n")

    assert list(script.cells) == ["model"]
    assert len(script.parts) == 2


@pytest.mark.parametrize("line", ["x = '# %% no'", "    # %% indented", "## %% two", "#%% tight"])
def test_only_a_line_that_begins_with_the_mark_starts_a_cell(line):
    assert Script.parse(f"{line}\n").parts == ()


def test_the_scripts_name_is_no_part_of_its_identity():
    assert Script.parse(TEXT, name="a") == Script.parse(TEXT, name="b")


def test_the_digest_changes_with_the_text(script):
    assert script.sha256 == Script.parse(TEXT).sha256
    assert script.sha256 != script.with_cells(model=NEW_MODEL).sha256


def test_labkits_own_scripts_load_by_name():
    assert "ddp" in script_names()
    for name in script_names():
        assert Script.load(name).name == name


def test_a_misspelt_name_is_answered_with_the_nearest_and_all_there_are():
    with pytest.raises(ScriptError, match=r"no script named 'ddpp'; did you mean 'ddp'\? There are: single, .*ddp, .*"):
        Script.load("ddpp")


def test_a_name_like_no_other_is_answered_with_all_there_are():
    with pytest.raises(ScriptError) as caught:
        Script.load("qqqqqq")

    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in script_names())


def test_a_script_loads_from_a_path_with_or_without_the_suffix(tmp_path):
    for name in ("train.py", "train"):
        path = tmp_path / name
        path.write_text(TEXT)
        assert str(Script.load(path)) == str(Script.load(str(path))) == TEXT
        assert Script.load(path).name == "train"


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(ScriptError, match=r"script not found: .*gone\.py \(No such file or directory\)"):
        Script.load(tmp_path / "gone.py")


def test_a_folder_called_like_a_script_is_refused(tmp_path):
    (tmp_path / "train.py").mkdir()

    with pytest.raises(ScriptError, match=r"train\.py is a folder; expected a Python script"):
        Script.load(tmp_path / "train.py")


def test_a_folder_is_called_a_folder(tmp_path):
    with pytest.raises(ScriptError, match="is a folder"):
        Script.load(tmp_path)


@pytest.mark.parametrize("text", ["", "\n \n\t\n"])
def test_an_empty_script_is_refused(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)

    with pytest.raises(ScriptError, match=r"train\.py is empty"):
        Script.load(path)


def test_a_script_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes("name = 'Müller'\n".encode("latin-1"))

    with pytest.raises(ScriptError, match=r"train\.py cannot be decoded: invalid or missing encoding declaration"):
        Script.load(path)


SOURCES = {
    "latin-1": "# -*- coding: latin-1 -*-\nprint('café')\n".encode("latin-1"),
    "second line": "#!/usr/bin/env python\n# vim: set fileencoding=cp1252 :\nprint('“€”')\n".encode("cp1252"),
    "second line, but the first is code": b"x = 1\n# coding: latin-1\nprint(x, 'a')\n",
    "byte order mark": "\ufeffprint('é')\n".encode(),
    "windows": "# coding: utf-8\r\nprint('é')\r\n".encode(),
    "old mac": b"x = 3\rprint(x)\r",
    "form feed": b"\x0c\nprint(1)\n\x0c\nprint('\x0b\x1c', 2)\n",
    "line separator": "print('a\u2028b\x85c')\n".encode(),
    "shift-jis": "# coding: shift_jis\nprint('日本')\n".encode("shift_jis"),
    "no end of line": b"print(1)",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_python_reads_in_any_encoding_is_a_script_and_stays_the_same_file(source, tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(source)
    script = Script.load(path)
    script.check()

    assert script.encoded() == source
    with tokenize.open(path) as file:
        assert str(script) == file.read()
    assert script.write(tmp_path / "copy.py").read_bytes() == source
    outputs = []
    for code in (source, str(script)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "train.py", "exec"), {})
        outputs.append(out.getvalue())
    assert outputs[0] == outputs[1] != ""


def test_a_changed_script_is_written_in_the_encoding_that_it_declares(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes("# coding: latin-1\n# %% model\nNAME = 'é'\n".encode("latin-1"))
    script = Script.load(path)

    changed = script.with_cells(model="NAME = 'à'\n")
    assert changed.encoded() == str(changed).encode("latin-1")
    assert b"'\xe0'" in changed.encoded()
    with pytest.raises(ScriptError, match=r"train.py cannot be compiled: 'latin-1' codec can't encode"):
        script.with_cells(model="NAME = '→'\n").check()


def test_lines_are_counted_as_python_counts_them():
    text = "\x0c\nA = 'a\x0bb\u2028c'\n# %% model\nx = 1\n\x0c\ny = 2\n# %% main\nboom\n"
    script = Script.parse(text)
    line = next(node.lineno for node in ast.walk(ast.parse(text)) if getattr(node, "id", "") == "boom")

    assert script.cell_at(line) == (script.cells["main"], 1)
    assert "z = 3" in str(script.with_cells(y="y = 5\nz = 3\n"))
    assert "x = 1" in str(script.with_cells(y="y = 5\n"))


def test_a_title_inside_a_function_or_a_text_is_a_comment(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("def f():\n# %% not a cell\n    return '''\n# %% neither\n'''\n")
    script = Script.load(path)

    assert script.parts == ()
    script.check()
    assert script.encoded() == path.read_bytes()


def test_a_script_that_python_cannot_parse_for_its_depth_is_refused(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("x = " + "(" * 5000 + ")" * 5000 + "\n")

    with pytest.raises(ScriptError, match=r"train.py cannot be compiled"):
        Script.load(path).check()


def test_a_notebook_is_no_script_and_says_how_to_make_one(tmp_path):
    path = tmp_path / "my lab.ipynb"
    path.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')

    with pytest.raises(
        ScriptError, match=r"is a notebook; expected a Python script\. .*nbconvert --to script '.*my lab"
    ):
        Script.load(path)


@pytest.mark.parametrize(("kind", "make"), [("a named pipe", os.mkfifo), ("a socket", bind), ("a folder", os.mkdir)])
def test_what_is_not_a_file_is_refused_and_not_waited_for(kind, make, tmp_path):
    make(tmp_path / "train.py")
    (tmp_path / "link.py").symlink_to("train.py")

    for name in ("train.py", "link.py"):
        with pytest.raises(ScriptError, match=f"{name} is {kind}; expected a Python script"):
            Script.load(tmp_path / name)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero", "/dev/stdin"])
def test_a_device_is_refused(device):
    with pytest.raises(ScriptError, match=f"{device} is a .*; expected a Python script"):
        Script.load(device)


def test_a_link_to_nothing_says_what_it_links_to(tmp_path):
    (tmp_path / "train.py").symlink_to("gone.py")

    with pytest.raises(ScriptError, match=r"script not found: .*train.py \(a link to gone.py, which does not exist\)"):
        Script.load(tmp_path / "train.py")


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())

    assert str(Script.load(path)) == TEXT


def test_a_cell_is_replaced_by_text_and_the_others_stay(script):
    changed = script.with_cells(model=NEW_MODEL)

    assert changed.cells["model"].text.strip() == NEW_MODEL.strip()
    assert changed.cells["main"] == script.cells["main"]
    assert changed.head == script.head
    assert str(script) == TEXT


def test_a_script_with_a_replaced_cell_parses_to_itself(script):
    changed = script.with_cells(model=NEW_MODEL)

    assert Script.parse(str(changed)) == changed


def test_a_cell_given_without_a_final_newline_does_not_touch_the_next_title(script):
    changed = script.with_cells(model="area = abs")

    assert list(Script.parse(str(changed)).cells) == ["model", "main"]


def test_the_last_cell_of_a_file_without_a_final_newline_can_replace_another(script):
    other = Script.parse("# %% model\narea = abs")

    changed = script.with_cells(model=other.cells["model"])

    assert list(Script.parse(str(changed)).cells) == ["model", "main"]


def test_a_cell_is_replaced_by_a_live_function_of_a_module(script, load_module):
    module = load_module("import os\n\n\ndef area(radius):\n    return 4 * radius\n")

    changed = script.with_cells(model=module.area)

    assert changed.cells["model"].text.strip() == "def area(radius):\n    return 4 * radius"
    assert changed.cells["model"].origin.endswith("written_beside.py:4")


def test_a_cell_of_another_script_keeps_its_origin(script):
    donor = Cell("whatever", NEW_MODEL, "notebook cell In [3]")

    changed = script.with_cells(model=donor)

    assert changed.cells["model"] == Cell("model", NEW_MODEL, "notebook cell In [3]")


VOLUME = 'def main():\n    return volume(1)\n\n\nif __name__ == "__main__":\n    main()\n'


def test_a_main_that_would_not_start_is_refused(script):
    with pytest.raises(ScriptError, match="must end with `if __name__"):
        script.with_cells(main="def main():\n    return area(1)\n")


def test_two_cells_replaced_together_are_checked_together(script):
    changed = script.with_cells(model="def volume(r):\n    return r\n", main=VOLUME)

    changed.check()


def test_replacing_an_unknown_cell_names_the_nearest_and_all(script):
    with pytest.raises(ScriptError, match=r"no cell is titled 'modle'; did you mean 'model'\? There are: model, main"):
        script.with_cells(modle=NEW_MODEL)


def test_replacing_a_title_that_two_cells_have_is_refused():
    script = Script.parse("# %% model\nx = 1\n# %% model\ny = 1\n")

    with pytest.raises(ScriptError, match="several cells are titled 'model'"):
        script.with_cells(model="x = 2\n")


def test_a_replaced_cell_must_define_what_others_use(script):
    with pytest.raises(ScriptError, match=r"the 'model' cell must define area\(radius\); yours defines volume"):
        script.with_cells(model="def volume(radius):\n    return radius\n")


def test_a_replaced_cell_that_defines_nothing_is_reported(script):
    with pytest.raises(ScriptError, match=r"the 'model' cell must define area\(radius\); yours defines nothing"):
        script.with_cells(model="# to be done\n")


def test_a_replaced_cell_may_drop_what_nobody_uses(script):
    script.with_cells(model=NEW_MODEL).check()


def test_a_replaced_cell_may_use_what_another_cell_defines(script):
    script.with_cells(model="def area(radius):\n    return main\n")


def test_a_replaced_cell_must_not_use_what_no_cell_defines(script):
    with pytest.raises(ScriptError, match="the 'model' cell uses factor, math, which no cell of the script defines"):
        script.with_cells(model="def area(radius):\n    return factor * math.pi * radius**2\n")


def test_a_replaced_cell_may_use_what_the_head_imports():
    script = Script.parse("import math\n\n# %% model\narea = math.floor\n# %% main\nx = area(1.5)\n")

    script.with_cells(model="area = math.ceil\n")


def test_a_replaced_cell_with_a_syntax_error_is_refused_with_its_own_line(script):
    with pytest.raises(ScriptError, match="the 'model' cell has a syntax error at line 2"):
        script.with_cells(model="def area(radius):\nreturn 1\n")


def test_a_replaced_cell_that_acts_is_refused(script):
    with pytest.raises(ScriptError, match=r"the 'model' cell also runs code at line 3: print\(area\(2\)\)"):
        script.with_cells(model=f"{NEW_MODEL}print(area(2))\n")


def test_a_text_of_several_cells_is_refused(script):
    with pytest.raises(ScriptError, match="contains a `# %%` line; pass one cell at a time"):
        script.with_cells(model=f"{NEW_MODEL}# %% more\n")


def test_an_object_without_source_is_refused(script):
    with pytest.raises(ScriptError, match="expected a function, or a class"):
        script.with_cells(model=len)


def test_check_passes_a_whole_script(script):
    script.check()


def test_check_names_a_cell_that_uses_what_none_defines():
    with pytest.raises(ScriptError, match="the 'main' cell uses area"):
        Script.parse("# %% main\nx = area(2)\n").check()


def test_check_counts_what_the_head_defines():
    Script.parse("import math\n\n# %% main\nx = math.pi\n").check()


@pytest.mark.parametrize("text", ["x = = 1\n", "x = = 1\n# %% model\ny = 1\n", "return\n", "# %% a\nreturn\n"])
def test_check_refuses_what_does_not_compile(text):
    with pytest.raises(ScriptError, match="line 1|line 2"):
        Script.parse(text, name="demo").check()


@pytest.mark.parametrize(
    "text", ["from math import *\n# %% main\nx = pi\n", "# %% a\nfrom math import *\n# %% b\nx = pi\n"]
)
def test_check_passes_a_script_with_a_star_import(text):
    Script.parse(text).check()


def test_a_diff_shows_what_changes_from_the_other_script(script):
    changed = Script.parse(str(script.with_cells(model=NEW_MODEL)), name="mine")

    lines = changed.diff(script).lines()

    assert lines[:2] == ["--- demo.py", "+++ mine.py"]
    assert "-    return math.pi * radius**2" in lines
    assert "+    return 3 * radius**2" in lines
    assert not any("main()" in line for line in lines if line[0] in "+-")


def test_a_diff_of_equal_scripts_says_so(script):
    assert str(script.diff(Script.parse(TEXT, name="other"))) == "other.py and demo.py are the same"


def test_a_diff_in_a_notebook_escapes_the_code(script):
    changed = script.with_cells(model='def area(radius):\n    return "<script>alert(1)</script>"\n')

    bundle = changed.diff(script)._repr_mimebundle_()

    assert "<script" not in bundle["text/html"]
    assert "&lt;script&gt;" in bundle["text/html"]
    assert bundle["text/plain"] == str(changed.diff(script))


def test_a_written_script_loads_as_itself(script, tmp_path):
    path = script.write(tmp_path / "mine.py")

    assert Script.load(path) == script


def test_writing_the_same_script_twice_is_harmless(script, tmp_path):
    script.write(tmp_path / "mine.py")
    script.write(tmp_path / "mine.py")

    assert (tmp_path / "mine.py").read_text() == TEXT


def test_writing_never_replaces_a_file_that_says_something_else(script, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("precious = 1\n")

    with pytest.raises(ScriptError, match=r"mine\.py exists and differs"):
        script.write(path)

    assert path.read_text() == "precious = 1\n"


@pytest.mark.parametrize("target", ["folder", "binary.py", "missing/mine.py"])
def test_a_target_that_cannot_be_written_is_a_script_error(script, tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")

    with pytest.raises(ScriptError):
        script.write(tmp_path / target)


def test_every_line_of_a_file_is_found_in_its_cell(script):
    lines = str(script).splitlines()
    found = {}
    for number, line in enumerate(lines, 1):
        place = script.cell_at(number)
        if place is not None:
            cell, within = place
            found.setdefault(cell.title, []).append(within)
            assert cell.text.splitlines()[within - 1] == line

    assert {title: len(numbers) for title, numbers in found.items()} == {
        cell.title: len(cell.text.splitlines()) for cell in script.parts
    }


@pytest.mark.parametrize("line", [1, 2, 3, 11, 0, -1, 1000])
def test_the_head_the_titles_and_lines_outside_are_in_no_cell(script, line):
    assert script.cell_at(line) is None


def test_the_only_line_of_a_last_cell_without_a_final_newline_is_found():
    cell, within = Script.parse("# %% main\nraise SystemExit").cell_at(2)

    assert (cell.title, within) == ("main", 1)


def test_the_last_line_of_a_file_without_a_final_newline_is_found():
    cell, within = Script.parse("# %% main\nx = 1\nraise SystemExit").cell_at(3)

    assert (cell.title, within) == ("main", 2)


def test_a_script_shows_itself_folded_by_cell_in_a_notebook_and_in_one_line_elsewhere(script):
    bundle = script._repr_mimebundle_()

    assert bundle["text/plain"] == repr(script)
    assert "\n" not in repr(script)
    assert bundle["text/html"].count("<details") == 2
    assert "<style" not in bundle["text/html"]
    assert "radius" in bundle["text/html"]


def test_a_script_is_made_of_cells_of_ones_own():
    script = Script.of("sums", numbers="import math\n\nN = 3\n", work="def main():\n    print(math.factorial(N))\n")

    assert Script.parse(str(script), name="sums") == script
    assert list(script.cells) == ["numbers", "work", "run"]
    done = subprocess.run([sys.executable, "-c", str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "6\n"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"a": "x = 1\n"}, r"a script runs main\(\), but no cell defines it; got the cells: a"),
        ({"a": "def main():\n    print(missing)\n"}, "the 'a' cell uses missing, which no cell of the script defines"),
        ({"a": "def main():\n    pass\nmain()\n"}, "the 'a' cell also runs code at line 3"),
    ],
)
def test_cells_that_make_no_script_are_refused(cells, message):
    with pytest.raises(ScriptError, match=message):
        Script.of("sums", **cells)

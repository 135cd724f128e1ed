"""A notebook as a kernel, labkit as a wheel, what holds in a session; what is sent is checked by Kaggle's client."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import subprocess
import sys
import time
import zipfile
from importlib.metadata import requires, version
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kaggle.api.kaggle_api_extended import KaggleApi
from slugify import slugify

import labkit
from labkit.cli import main
from labkit.errors import LabError
from labkit.files import write_json
from labkit.kaggle import following, previous_checkpoints, versions
from labkit.kaggle.image import MODULES
from labkit.kaggle.kernel_files import MOST_BYTES, TWO_T4, build
from labkit.kaggle.service import Status
from labkit.kaggle.wheels import wheel
from labkit.needs import needs
from labkit.record import RunFolder
from labkit.session import RESERVED_SECONDS, seconds_left, seconds_to_train, working_folder
from labkit.stored_runs import runs_root
from labkit.view.live.terminal import StatusLine

ROOT = Path(__file__).parents[2]
LABS = ROOT / "notebooks"
CLIENT = KaggleApi()


def small(package):
    return f"{package}-1.2-py3-none-any.whl", b"a wheel"


def notebook(*cells, minor=5):
    book = nbformat.v4.new_notebook(cells=[*cells], metadata={"kernelspec": {"name": "python3", "display_name": "P"}})
    book["nbformat_minor"] = minor
    return nbformat.writes(book)


def code(source, *tags):
    return nbformat.v4.new_code_cell(source, metadata={"tags": [*tags]} if tags else {})


PARAMETERS = code("nproc_per_node: int = 2  # ranks\nlr = 0.1", "parameters")


def kernel(*cells, **options):
    options = {"name": "03_ddp.ipynb", "user": "me", "wheel_of": small, "push": "0a1b"} | options
    return build(notebook(*cells), **options)


def cells_of(kernel):
    book = nbformat.reads(kernel.notebook, 4)
    nbformat.validate(book)
    return book.cells


def test_a_kernel_is_the_notebook_after_one_folded_cell_that_says_what_it_is():
    first, *rest = cells_of(kernel(nbformat.v4.new_markdown_cell("# Title"), PARAMETERS, code("1 + 1")))

    assert first.metadata == {"_kg_hide-input": True, "jupyter": {"source_hidden": True}}
    assert first.source.startswith("# labkit 1.2 in text, because")
    assert [cell.source for cell in rest] == ["# Title", PARAMETERS.source, "1 + 1"]


@pytest.mark.parametrize(
    ("source", "wheels"),
    [
        ("import torch\nfrom labkit_labs import Lesson", ["labkit", "labkit_labs"]),
        ("if True:\n    import labkit_labs.lesson", ["labkit", "labkit_labs"]),
        ("%matplotlib inline\nimport labkit_labs", ["labkit", "labkit_labs"]),
        ("import labkit  # from labkit_labs import Lesson", ["labkit"]),
        ("from labkit_labs_of_mine import x", ["labkit"]),
    ],
)
def test_a_kernel_brings_the_labs_package_if_it_imports_it(source, wheels):
    prose = nbformat.v4.new_markdown_cell("from labkit_labs import Lesson")
    first = cells_of(kernel(prose, code(source)))[0].source

    (sizes,) = re.findall(r"^install\((.*), ", first, re.M)
    assert [name.partition("-")[0] for name in ast.literal_eval(sizes)] == wheels


def test_outputs_stay_behind():
    cell = code("1 + 1")
    cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text="2")], 7

    sent = cells_of(kernel(cell))[1]

    assert (sent.outputs, sent.execution_count) == ([], None)


def test_parameters_are_set_in_a_cell_after_the_one_that_is_tagged():
    values = {"nproc_per_node": 4, "lr": float("inf")}
    cells = cells_of(kernel(code("import os"), PARAMETERS, code("lr"), parameters=values))

    assert cells[3].source == "# Parameters\nnproc_per_node = 4\nlr = float('inf')\n"
    assert cells[3].metadata.tags == ["injected-parameters"]
    assert cells[4].source == "lr"


def test_parameters_that_papermill_set_before_are_replaced():
    cells = cells_of(kernel(PARAMETERS, code("lr = 1", "injected-parameters"), parameters={"lr": 2}))

    assert [cell.source for cell in cells[1:]] == [PARAMETERS.source, "# Parameters\nlr = 2\n"]


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([PARAMETERS], "03_ddp.ipynb has no parameter 'epochs'; it has lr, nproc_per_node"),
        ([code("%env X=1", "parameters")], "the parameters cell of 03_ddp.ipynb is not plain Python: invalid syntax"),
        ([code("epochs = 1")], "03_ddp.ipynb has no parameter 'epochs'; it has no cell tagged `parameters`"),
    ],
)
def test_a_parameter_that_the_notebook_lacks_raises(cells, told):
    with pytest.raises(labkit.LabError, match=told):
        kernel(*cells, parameters={"epochs": 1})


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            '{"cells": 1, "nbformat": 4}',
            '{"cells": [1], "nbformat": 4}',
            '{"cells": [], "nbformat": 3}',
        ),
        *('{"cells": [{"source": null}], "nbformat": 4}', '{"cells": [{"source": [1]}], "nbformat": 4}'),
    ],
)
def test_what_is_not_a_notebook_is_refused(text):
    with pytest.raises(labkit.LabError, match="x.ipynb is not a notebook"):
        build(text, name="x.ipynb", user="me", wheel_of=small, push="")


def test_a_kernel_that_kaggle_would_not_take_is_refused():
    with pytest.raises(labkit.LabError, match="would be a kernel of 1.0. MB; Kaggle accepts about 1 MB"):
        kernel(code("#" * MOST_BYTES))


@pytest.fixture
def project(tmp_path):
    """A folder with a script of one's own, a package beside it, and its data."""
    files = {
        "train.py": "from mymodel import Net\nopen('data.csv')\n",
        "mymodel/__init__.py": "Net = 1\n",
        "data.csv": "x\n1\n",
        "go.sh": "echo\n",
    }
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    (tmp_path / "project" / "go.sh").chmod(0o755)
    return tmp_path / "project"


OWN = [code("import labkit\nrun = labkit.launch('train.py', nproc_per_node=2)"), code("!bash go.sh")]


def test_a_kernel_brings_what_its_notebook_needs_and_unpacks_it_where_it_runs(project, tmp_path):
    sent = kernel(*OWN, folder=project, wheel_of=wheel)

    names = ["data.csv", "go.sh", "mymodel/__init__.py", "train.py"]
    assert sorted(file.name for file in sent.files) == names
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "data.csv").write_text("of another day")
    (tmp_path / "there" / "cell.py").write_text(cells_of(sent)[0].source)
    cell = [sys.executable, "cell.py"]
    done = subprocess.run(cell, cwd=tmp_path / "there", capture_output=True, text=True, check=True)
    assert "data.csv is left as it is; the one that came with the notebook differs" in done.stdout
    assert (tmp_path / "there" / "data.csv").read_text() == "of another day"
    for name in names[1:]:
        assert (tmp_path / "there" / name).read_bytes() == (project / name).read_bytes()
        assert (tmp_path / "there" / name).stat().st_mode == (project / name).stat().st_mode
    again = subprocess.run(cell, cwd=tmp_path / "there", capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout


def test_what_a_notebook_lacks_is_refused_with_its_name_unless_kaggle_has_it(project):
    (project / "data.csv").unlink()
    cells = [*OWN, code("import lightgbm_of_nobody")]
    told = r"beside it: lightgbm_of_nobody \(imported in cell 3, line 1\), data.csv \(train.py, line 2\)\. Put it there"
    with pytest.raises(LabError, match=told):
        kernel(*cells, folder=project)
    assert kernel(*cells, folder=project, there=["lightgbm_of_nobody", "data.csv"]).files


def test_what_kaggles_image_has_need_not_be_installed_here(project, monkeypatch):
    """As with the wheel alone: the export itself needs none of what labkit's runs need."""
    monkeypatch.setattr(needs, "is_somewhere", lambda name: name == "labkit")
    cells = [*OWN, code("import torch, numpy as np\nimport sklearn.datasets\nfrom PIL import Image")]
    assert kernel(*cells, folder=project).files
    with pytest.raises(LabError, match="nowhere"):
        kernel(code("import nowhere"), folder=project)


def test_labkits_own_requirements_are_on_kaggles_list():
    names = [re.split(r"[^\w-]", each)[0] for each in requires("labkit") if "extra ==" not in each]
    imported = {"ipython": "IPython", "nvidia-ml-py": "pynvml"}
    assert {imported.get(name, name) for name in names} <= MODULES


def test_what_lies_outside_of_a_notebooks_folder_is_refused(project):
    with pytest.raises(
        LabError, match=r"outside of its folder.*: \.\./train\.py \(cell 1, line 1\)\. Copy them beside"
    ):
        kernel(code("labkit.launch('../train.py')"), folder=project / "mymodel")


@pytest.mark.parametrize(
    ("size", "told"), [(400_000, "would be a kernel of 1.[23]. MB"), (21_000_000, "needs 20.0 MiB of")]
)
def test_files_that_are_too_large_are_refused_with_what_to_do_instead(project, size, told):
    noise = random.Random(0).randbytes(400_000)
    (project / "data.csv").write_bytes(noise if size == len(noise) else bytes(size))
    advice = rf"{told}.*: data\.csv \(.*, train\.py, line 2\)\. Upload large ones .* --there data\.csv"
    with pytest.raises(LabError, match=advice):
        kernel(*OWN, folder=project, wheel_of=wheel)
    assert "data.csv" not in {file.name for file in kernel(*OWN, folder=project, there=["data.csv"]).files}


def test_every_lab_is_a_kernel_that_kaggle_takes():
    """labkit and the labs' package are packed once, because that takes seconds."""
    empty = code("import labkit_labs")
    packages = len(kernel(empty, wheel_of=wheel).notebook) - len(kernel(empty).notebook)
    labs = sorted(LABS.glob("[0-9]*.ipynb"))
    assert len(labs) == 27
    for path in labs:
        sent = build(path.read_text(), name=path.name, user="me", push="", folder=LABS, there=["timm"], wheel_of=small)
        assert not sent.files
        assert len(sent.notebook.encode()) + packages < MOST_BYTES * 0.98, path


def test_the_export_lists_what_it_brings_with_sizes_and_places(project, monkeypatch, capsys):
    (project / "mine.ipynb").write_text(notebook(*OWN))
    monkeypatch.chdir(project)

    assert main(["kaggle", "export", "mine.ipynb", "--user", "me"]) == 0

    first, second, *files = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"labkit-mine: me/labkit-mine, 0\.\d\d of 1 MB\. Push it with: kaggle kernels push -p labkit-mine", first
    )
    assert second == "its first cell also brings, unless they are there already:"
    assert sorted(line.split()[0] for line in files) == ["data.csv", "go.sh", "mymodel/__init__.py", "train.py"]
    assert "  data.csv                   4 B  train.py, line 2" in files


def test_a_cell_for_an_editor_installs_what_was_uploaded_and_says_when_nothing_was(capsys):
    assert main(["kaggle", "cell"]) == 0
    cell = capsys.readouterr().out
    assert len(cell.splitlines()) <= 7
    assert {"/kaggle/input/*", "/kaggle/input/*/*/*", "/content"} == {
        f"/{place}" for place in re.findall(r'"(\w[\w/*]+)"', cell)
    }
    nothing = cell.partition("!")[0]
    with pytest.raises(AssertionError, match="there is no labkit-….whl: add its dataset with Add Input"):
        exec(nothing, {})

    assert main(["kaggle", "cell", "--embedded"]) == 0
    embedded = capsys.readouterr().out
    ast.parse(embedded)
    assert embedded.startswith(f"# labkit {labkit.__version__} in text")


def test_the_dataset_is_what_kaggles_client_uploads(tmp_path, capsys, own):
    """All its checks of a folder, up to where it would connect."""
    folder = tmp_path / "wheel"
    (folder).mkdir()
    (folder / "labkit-0.0.1-py3-none-any.whl").write_text("of an earlier version")

    assert main(["kaggle", "dataset", "--user", "me", "--labs", "--into", str(folder)]) == 0
    names = {f"{package}-{labkit.__version__}-py3-none-any.whl" for package in ("labkit", "labkit_labs")}
    assert {path.name for path in folder.iterdir()} == {*names, "dataset-metadata.json"}
    assert (folder / own[0]).read_bytes() == own[1]
    assert f"kaggle datasets create -p {folder}" in capsys.readouterr().out

    class Unconnected(KaggleApi):
        def build_kaggle_client(self):
            raise ConnectionAbortedError

    client = Unconnected()
    client.config_values[client.CONFIG_NAME_USER] = "me"
    with pytest.raises(ConnectionAbortedError):
        client.dataset_create_new(str(folder))
    assert main(["kaggle", "dataset", "--user", "me", "--into", str(folder)]) == 0
    assert main(["kaggle", "dataset", "--user", "another", "--into", str(folder)]) != 0
    assert "has the metadata of another dataset; choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("needed", "told"),
    [
        (["torch>=2.8", "pandas!=0.0.1", "x>=9; extra == 'labs'"], "has all packages that it needs here."),
        (["of-nobody>=1.5"], "needs of-nobody>=1.5 (not installed). What uses them will fail."),
        (["torch>=99.1"], "needs torch>=99.1 ("),
        (["torch>=2.8,<2.8.0; sys_platform == 'linux'"], "needs torch>=2.8,<2.8.0 ("),
        (["pytest!=PYTEST"], "needs pytest!=PYTEST ("),
    ],
)
def test_packages_that_are_missing_or_too_old_are_told_in_one_sentence(monkeypatch, needed, told):
    here = version("pytest")
    monkeypatch.setattr(versions, "requires", lambda name: [each.replace("PYTEST", here) for each in needed])
    assert versions.what_is_missing().startswith(f"labkit {labkit.__version__} {told.replace('PYTEST', here)}")


def test_two_t4s_no_internet_and_nobody_else_looks():
    told = kernel(inputs=["me/labkit-02-x"]).metadata

    assert told["id"] == "me/labkit-03-ddp"
    assert (told["enable_gpu"], told["machine_shape"], TWO_T4) == (True, "NvidiaTeslaT4", "NvidiaTeslaT4")
    assert (told["is_private"], told["enable_internet"]) == (True, False)
    assert told["kernel_sources"] == ["me/labkit-02-x"]
    other = kernel(internet=True, accelerator=None).metadata
    assert (other["enable_gpu"], other["machine_shape"], other["enable_internet"]) == (False, "", True)


@given(st.text(st.sampled_from("abzABZ019 -_"), min_size=5, max_size=40))
def test_the_address_is_what_kaggles_client_makes_of_the_title(title):
    try:
        made = kernel(title=title).metadata
    except labkit.LabError:
        assert len(slugify(title)) < 5
        return
    assert made["id"] == f"me/{slugify(title)}"
    CLIENT.validate_kernel_string(made["id"])


@pytest.mark.parametrize("title", ["abcd", "- -- -", "Größe der Stapel", "a/b/c/d/e", "1.000 Schritte"])
def test_a_title_that_makes_no_sure_address_is_refused(title):
    with pytest.raises(labkit.LabError, match="a title"):
        kernel(title=title)


def test_what_is_written_is_what_kaggles_client_pushes(tmp_path, capsys):
    """All its checks of a folder, up to where it would connect."""
    sent = kernel(PARAMETERS, parameters={"lr": 1})
    sent.write(tmp_path)

    class Unconnected(KaggleApi):
        def build_kaggle_client(self):
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        Unconnected().kernels_push(str(tmp_path))

    assert not capsys.readouterr().out  # it warns of titles that do not make the address
    assert json.loads((tmp_path / "kernel-metadata.json").read_text()) == sent.metadata


def test_an_export_writes_over_an_earlier_export_and_over_nothing_else(tmp_path):
    source = tmp_path / "03_ddp.ipynb"
    source.write_text(before := notebook(code("1 + 1")), encoding="utf-8")

    with pytest.raises(labkit.LabError, match="has a 03_ddp.ipynb that is not an export; choose another folder"):
        kernel().write(tmp_path)
    assert source.read_text(encoding="utf-8") == before
    described = tmp_path / "mine" / "kernel-metadata.json"
    described.parent.mkdir()
    described.write_text("{}")
    with pytest.raises(labkit.LabError, match="has a kernel-metadata.json that is not an export"):
        kernel().write(described.parent)

    kernel().write(tmp_path / "out")
    kernel(title="another").write(tmp_path / "out")
    assert "me/another" in (tmp_path / "out" / "kernel-metadata.json").read_text()


def test_a_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(labkit.LabError, match="cannot be written into .*file/out: Not a directory"):
        kernel().write(tmp_path / "file" / "out")


@pytest.mark.parametrize("wrong", [{"user": "me you"}, {"inputs": ["labkit-02"]}, {"inputs": ["a/b/c"]}])
def test_what_is_no_address_is_refused_before_it_is_sent(wrong):
    with pytest.raises(labkit.LabError, match="got '(me you|labkit-02|a/b/c)'"):
        kernel(**wrong)


@pytest.fixture(scope="module")
def own():
    return wheel()


def test_the_wheel_is_the_package_with_its_scripts(own):
    name, content = own
    archive = zipfile.ZipFile(BytesIO(content))
    tracked = subprocess.run(["git", "ls-files", "labkit", "scripts"], cwd=ROOT, capture_output=True, text=True)
    expected = {f"labkit/{path}" if path.startswith("scripts") else path for path in tracked.stdout.split()}

    assert name == f"labkit-{labkit.__version__}-py3-none-any.whl"
    if expected:
        assert {path for path in archive.namelist() if path.startswith("labkit/")} >= expected
    for path in ("train.py", "strategies/ddp.py", "extras/checkpoints.py", "tasks/digits.py"):
        assert archive.read(f"labkit/scripts/{path}") == (ROOT / "scripts" / path).read_bytes()
    assert wheel() == own


def test_pip_installs_the_wheel_offline_and_it_makes_itself_again(own, tmp_path):
    """An installed labkit must be able to do it, not only a checkout."""
    name, content = own
    (tmp_path / name).write_bytes(content)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", "there", name]
    subprocess.run(pip, cwd=tmp_path, check=True, timeout=60)
    again = "import sys, labkit.kaggle.wheels as w; print(w.__file__); sys.stdout.flush(); "
    again += "sys.stdout.buffer.write(w.wheel()[1])"

    done = subprocess.run(
        [sys.executable, "-c", again], cwd=tmp_path, env={"PYTHONPATH": "there"}, capture_output=True, check=True
    )

    where, _, made = done.stdout.partition(b"\n")
    assert where.decode().startswith(str(tmp_path / "there"))
    assert made == content
    assert (tmp_path / "there" / "bin" / "labkit").exists()


def test_labkit_and_the_labs_package_leave_a_fifteenth_of_what_kaggle_takes_to_the_notebook():
    labs = code("from labkit_labs import Lesson")
    sizes = [len(kernel(cell, wheel_of=wheel).notebook) for cell in (code("import labkit"), labs)]

    assert sizes[0] < MOST_BYTES * 0.86
    assert sizes[0] < sizes[1] < MOST_BYTES * 0.93


def test_the_labs_wheel_is_their_package():
    name, content = wheel("labkit_labs")
    archive = zipfile.ZipFile(BytesIO(content))
    tracked = subprocess.run(["git", "ls-files", "labkit_labs"], cwd=LABS, capture_output=True, text=True)

    assert name == f"labkit_labs-{labkit.__version__}-py3-none-any.whl"
    packed = {path for path in archive.namelist() if path.startswith("labkit_labs/")}
    assert packed >= ({*tracked.stdout.split()} or {"labkit_labs/__init__.py", "labkit_labs/lesson.py"})
    assert not any(".dist-info/" not in path for path in {*archive.namelist()} - packed)
    assert b"Requires-Dist: labkit\n" in archive.read(f"labkit_labs-{labkit.__version__}.dist-info/METADATA")


def test_a_notebook_that_imports_the_labs_package_where_it_is_not_is_refused_with_the_command(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "labkit_labs" else found(name))

    with pytest.raises(labkit.LabError, match=r"labkit_labs is not installed for .* pip install \. \./notebooks"):
        kernel(code("import labkit_labs"), wheel_of=wheel)


def test_in_a_terminal_what_goes_on_is_written_over_and_the_rest_stays(capsys):
    line = StatusLine()
    line.is_live = True
    for text in (
        'labkit: step 1 {"run": "r", "state": "running"}',
        "\x1b[31mof the notebook\x1b[0m",
        'labkit: step 2 {"run": "r", "state": "succeeded"}',
    ):
        line.relay(text)

    assert capsys.readouterr().out.split("\r") == [
        "",
        "r: step 1",
        f"{'':9}",
        "of the notebook\n",
        f"{'':9}",
        "r: succeeded, step 2\n",
    ]


class Made:
    """A service whose answers are made up: statuses in order, the last for ever, one that is none fails; and a log that
    is cut so often."""

    def __init__(self, *statuses, log=(), seconds=0.0, cuts=0):
        self.statuses, self.lines, self.seconds, self.cuts = list(statuses), log, seconds, cuts

    def status(self, kernel):
        name = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not name:
            raise LabError("no answer")
        return Status(name)

    def log(self, kernel):
        for line in self.lines:
            time.sleep(self.seconds)
            yield line
        if self.cuts:
            self.cuts -= 1
            raise LabError("the connection was cut")


@pytest.fixture
def in_a_hurry(monkeypatch):
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(following, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(following, "OUTAGE_SECONDS", 0.2)


def test_a_log_that_was_read_for_long_does_not_make_its_end_look_like_another_sessions(in_a_hurry, capsys):
    """The session is over when its log, in which the mark was long ago, has ended."""
    service = Made("RUNNING", "COMPLETE", log=["push 1", *"abc"], seconds=0.05)

    assert following.follow(service, "me/x", mark="push 1").name == "COMPLETE"
    assert capsys.readouterr().out.split() == ["a", "b", "c"]


def test_a_log_that_is_cut_is_read_again_as_often_as_it_takes(in_a_hurry, capsys):
    service = Made(*["RUNNING"] * 4, "COMPLETE", log="ab", seconds=0.1, cuts=4)

    assert following.follow(service, "me/x").name == "COMPLETE"
    assert capsys.readouterr().out.split() == ["a", "b"]
    with pytest.raises(LabError, match="the connection was cut"):
        following.follow(Made("COMPLETE", cuts=10_000), "me/x")


def test_an_outage_is_waited_out_and_one_that_does_not_end_is_told(in_a_hurry):
    assert following.follow(Made("RUNNING", *[None] * 5, "RUNNING", "ERROR"), "me/x").name == "ERROR"
    with pytest.raises(LabError, match="no answer"):
        following.follow(Made("RUNNING", None), "me/x")


# In a session


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A folder in place of /kaggle."""
    for name in ("working", "input"):
        (tmp_path / "kaggle" / name).mkdir(parents=True)
    monkeypatch.setenv("LABKIT_KAGGLE_ROOT", str(tmp_path / "kaggle"))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    monkeypatch.delenv("LABKIT_RUNS")
    return tmp_path / "kaggle"


def left_behind(output, run, *steps, own=True):
    """A run in another kernel's output, and its checkpoints: in its own folder, or in the one that is handed on."""
    folder = RunFolder(output / "runs" / run)
    folder.path.mkdir(parents=True)
    write_json(folder.manifest, {"format": 1})
    for step in steps:
        place = (folder.checkpoints if own else output / "checkpoints") / f"step-{step}"
        place.mkdir(parents=True)
        (place / "COMMIT.json").write_text("{}")
        (place / "0.bin").write_text(run)
        (place.parent / "best").mkdir(exist_ok=True)


def test_runs_go_to_the_folder_that_kaggle_keeps_wherever_a_cell_has_gone(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert runs_root() == session / "working" / "runs"
    assert runs_root(tmp_path / "x") == tmp_path / "x"
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert runs_root() == tmp_path / "runs"


def test_a_session_ends_twelve_hours_after_its_oldest_process_began(session, monkeypatch):
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", "1000000000")
    longer = seconds_left()
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", "999000000")

    assert longer - seconds_left() == pytest.approx(1e6, abs=5)
    assert seconds_to_train() == pytest.approx(seconds_left() - RESERVED_SECONDS, abs=5)


def test_a_length_of_a_session_that_is_no_number_is_refused(session, monkeypatch):
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", "9h")
    with pytest.raises(LabError, match="LABKIT_SESSION_SECONDS must be a number of seconds, got '9h'"):
        seconds_to_train()


def test_a_session_that_is_nearly_over_leaves_half_to_train_and_one_that_is_over_nothing(session, monkeypatch):
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", "1000000000")
    used = 1e9 - seconds_left()
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", str(used + 600))
    assert seconds_to_train() == pytest.approx(300, abs=5)
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", str(used - 1))
    assert seconds_to_train() is None
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert seconds_to_train() is None


def test_the_first_session_has_nothing_to_go_on_with(session):
    assert previous_checkpoints() == working_folder() / "checkpoints"
    assert not [*(session / "working" / "checkpoints").iterdir()]


@pytest.mark.parametrize("place", ["notebooks/me/labkit-03-ddp", "labkit-03-ddp"])
@pytest.mark.parametrize("own", [True, False])
def test_the_newest_runs_checkpoints_are_copied_to_where_they_can_be_written(session, place, own):
    left_behind(session / "input" / place, "20260101T000000Z-ddp-0001", *([2, 4] if own else []))
    left_behind(session / "input" / place, "20260102T000000Z-ddp-0002", 6, 8, own=own)
    left_behind(session / "input" / place, "20260103T000000Z-fsdp-0003")
    (session / "input" / place / "checkpoints" / "step-10.tmp").mkdir(parents=True)

    folder = previous_checkpoints()

    assert folder == session / "working" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step-6", "step-8"]


def test_what_this_session_has_saved_is_not_replaced(session):
    left_behind(session / "input" / "old", "20260101T000000Z-ddp-0001", 8)
    left_behind(session / "working", "20260102T000000Z-ddp-0002", 9, own=False)

    assert [path.name for path in previous_checkpoints().glob("step-*")] == ["step-9"]


def test_what_another_script_has_saved_is_there_again(session):
    place = session / "input" / "notebooks" / "me" / "mine"
    left_behind(place, "20260101T000000Z-train-0001")
    (place / "checkpoints" / "weights").mkdir(parents=True)
    (place / "checkpoints" / "state.pt").write_text("of epoch 4")
    (place / "checkpoints" / "weights" / "rank0.pt").write_text("0")

    folder = previous_checkpoints()

    assert (folder / "state.pt").read_text() == "of epoch 4"
    assert (folder / "weights" / "rank0.pt").exists()
    (folder / "state.pt").write_text("of epoch 5")
    assert (previous_checkpoints() / "state.pt").read_text() == "of epoch 5"


def test_several_trainings_go_on_each_with_its_own(session):
    left_behind(session / "input" / "old", "20260101T000000Z-ddp-0001", 4)
    left_behind(session / "input" / "old", "20260102T000000Z-fsdp-0002", 8)
    left_behind(session / "input" / "old", "20260103T000000Z-big-ddp-0003", 12)

    for name, step in (("ddp", "step-4"), ("fsdp", "step-8")):
        folder = previous_checkpoints(name)
        assert folder == session / "working" / "checkpoints" / name
        assert sorted(path.name for path in folder.iterdir()) == ["best", step]
    assert not list(previous_checkpoints("fsdp1").glob("*"))


def test_the_first_cell_leaves_the_packages_that_are_there_alone(tmp_path):
    sent = kernel(code("import labkit_labs"), wheel_of=wheel)
    (tmp_path / "labkit").mkdir()  # a folder of that name is no package
    (tmp_path / "cell.py").write_text(cells_of(sent)[0].source)

    done = subprocess.run([sys.executable, "cell.py"], cwd=tmp_path, capture_output=True, text=True, check=True)

    has_all = f"labkit {labkit.__version__} has all packages that it needs here.\n"
    assert (done.stdout, done.stderr) == (f"{has_all}{sent.mark}\n", "")

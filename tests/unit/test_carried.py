"""What a run on several hosts brings of its program, and where a host then runs it."""

from __future__ import annotations

import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest

from labkit.errors import LaunchError
from labkit.launch_options import LaunchOptions
from labkit.launcher import create_run, prepare_launch
from labkit.launcher.carried import MOST_BYTES, enter
from labkit.record import Nodes, RunFolder
from labkit.write import Script


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import beside\nprint(open('said.txt').read(), beside)\n")
    (folder / "beside.py").touch()
    (folder / "said.txt").write_text("this")
    monkeypatch.chdir(folder)
    return folder


def created(script: Script | Path | str, **parameters) -> RunFolder:
    launch = prepare_launch(script, LaunchOptions(runs_dir="../runs"), parameters, nodes=Nodes(2, 1))
    return create_run(launch)


def entered(run: RunFolder, word: str = "train.py") -> tuple[str, Path]:
    (program,) = enter(run, [word])
    return program, Path.cwd()


def brought(run: RunFolder, project: Path) -> set[str]:
    place = run.carried / str(project).lstrip("/")
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


def test_a_host_that_has_the_same_files_runs_where_the_run_was_launched(project):
    run = created("train.py")

    assert brought(run, project) == {"train.py", "beside.py", "said.txt"}
    assert entered(run) == ("train.py", project)


@pytest.mark.parametrize("change", ["all", "folder", "text"])
def test_a_host_that_lacks_a_file_or_has_another_runs_the_copy(project, change):
    run, whole = created(project / "train.py"), str(project / "train.py")
    match change:
        case "all":
            shutil.rmtree(project)
        case "folder":
            (project / "beside.py").unlink()
        case "text":
            (project / "said.txt").write_text("that")

    program, folder = entered(run, whole)

    assert folder == run.carried / str(project).lstrip("/")
    assert program == str(folder / "train.py")
    assert (folder / "said.txt").read_text() == "this"


def test_a_composed_script_brings_the_modules_beside_the_notebook(project):
    script = Script.load("ddp").with_cells(model="import beside\nfrom torch import nn\nModel = nn.Identity\n")

    run = created(script, steps=2)

    assert brought(run, project) == {"beside.py"}


def test_what_is_too_large_or_missing_is_only_refused_where_it_is_missed(project):
    (project / "said.txt").write_bytes(bytes(MOST_BYTES + 1))
    (project / "train.py").write_text("import beside\nopen('said.txt')\nopen('not_there.txt')\n")
    run = created("train.py")
    assert entered(run) == ("train.py", project)

    shutil.rmtree(project)

    with pytest.raises(LaunchError, match=r"not_there\.txt \(train, line 3\), said\.txt \(8\.0 MiB\): launch from a f"):
        entered(run)


def test_a_file_that_was_changed_is_named_where_the_copy_is_not_whole(project):
    (project / "train.py").write_text("import beside\nfrom glob import glob\nglob('data/*')\n")
    (project / "data").mkdir()
    for number in range(5):
        (project / "data" / f"{number}.bin").write_bytes(bytes(MOST_BYTES // 2))
    run = created("train.py")
    (project / "beside.py").write_text("changed")

    with pytest.raises(LaunchError, match=r"lacks .*project/beside\.py, or has another .* and 1 more: launch from"):
        entered(run)

    shutil.rmtree(project)
    with pytest.raises(LaunchError, match="cannot see .*project, and"):
        entered(run)


def test_the_modules_in_an_archive_are_not_missed(project):
    with ZipFile("app.pyz", "w") as archive:
        archive.writestr("__main__.py", "import inside\nimport package.part\nopen('said.txt')\n")
        archive.writestr("inside.py", "")
        archive.writestr("package/part.py", "")
    run = created("app.pyz")
    shutil.rmtree(project)

    program, folder = entered(run, "app.pyz")

    assert (folder / program).is_file()
    assert brought(run, project) == {"app.pyz", "said.txt"}


def test_a_script_that_is_a_link_finds_the_modules_beside_the_file(project):
    (project / "links").mkdir()
    (project / "links" / "mine.py").symlink_to(project / "train.py")
    run = created("links/mine.py")
    shutil.rmtree(project)

    program, folder = entered(run, "links/mine.py")

    assert ((folder / program).resolve().parent / "beside.py").is_file()


def test_earlier_runs_are_not_brought_wherever_they_are(project):
    (project / "train.py").write_text("from pathlib import Path\nfor f in Path('.').rglob('*.txt'): print(f)\n")
    for _ in range(2):
        launch = prepare_launch("train.py", LaunchOptions(runs_dir="kept"), {}, nodes=Nodes(2, 1))
        run = create_run(launch)
    assert brought(run, project) == {"train.py", "said.txt"}


def test_checkpoints_in_a_folder_that_a_host_does_not_see_are_refused(project):
    run = created(Script.load("ddp", "checkpoints"), checkpoint_dir="saved", save_every=2)
    shutil.rmtree(project)

    with pytest.raises(LaunchError, match="checkpoint_dir='saved' lies: pass the whole path"):
        entered(run)

"""What `labkit kaggle export` writes, run as Save & Run All runs it: papermill, with Kaggle's versions, no network, no
labkit, in an empty folder. One thing is not as there: no GPU, so gloo instead of nccl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from integration.own_project import LAUNCH as PROJECTS_LAUNCH
from integration.own_project import SHOW, SHOWN, own_project, shown_in
from integration.own_project import written as own_cells

import labkit
from labkit.cli import main
from labkit.kaggle.wheels import wheel
from labkit.view.live.terminal import read_progress_line

pytestmark = [pytest.mark.kaggle, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OFFLINE = ROOT / "tests" / "scripts" / "offline.py"
IMAGE = ROOT / "build" / "kaggle-image"
TORCH = "2.10.0"
# Of Kaggle's image of June 2026, or what its base had a month before.
PINS = [
    *(f"torch=={TORCH}", "ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==8.1.5", "jupyter_client==7.4.9"),
    *("traitlets==5.7.1", "plotly==5.24.1", "nbconvert==6.4.5", "papermill==2.6.0", "psutil==5.9.5"),
    *("numpy", "pandas", "matplotlib", "scikit-learn", "pooch", "rich", "nvidia-ml-py", "pytest", "pytest-timeout"),
]
BASE = "import sysconfig, torch; print(torch.__version__, sysconfig.get_path('purelib')); "
BASE += "import sys; from importlib.metadata import distributions as d; "
BASE += "sys.exit(any(x.name == 'labkit' for x in d()))"


@pytest.fixture(scope="session")
def image() -> list[str]:
    """Folders that hold Kaggle's packages, made once; the first lies in an environment of its own."""
    python = shutil.which("python3.12")  # Kaggle's
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:  # pyenv's empty shim
        python = sys.executable
    probed = subprocess.run([python, "-c", BASE], capture_output=True, text=True)
    version, _, folder = probed.stdout.strip().partition(" ")
    # an interpreter that has Kaggle's torch spares gigabytes, unless labkit is there, too
    shared = [folder] if probed.returncode == 0 and version.startswith(TORCH) else []
    made = IMAGE / "made.txt"
    told = "\n".join([python, *shared, *PINS])
    if not made.exists() or made.read_text() != told:
        shutil.rmtree(IMAGE, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(IMAGE)], check=True)
        _add(IMAGE, shared)
        install = [str(IMAGE / "bin" / "python"), "-m", "pip", "install", "--quiet", *PINS]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Kaggle's versions cannot be installed for {python}: {done.stderr[-300:]}")
        made.write_text(told)
    return [str(_site(IMAGE)), *shared]


def _site(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*/site-packages"))


def _add(environment: Path, folders: list[str]) -> None:
    (_site(environment) / "image.pth").write_text("".join(f"{folder}\n" for folder in folders))


class Session:
    """A new machine of Kaggle's: its packages, an empty /kaggle, and nothing of ours."""

    def __init__(self, root: Path, image: list[str]):
        self.root, self.working = root / "kaggle", root / "kaggle" / "working"
        for folder in (self.working, self.root / "input", root / "home"):
            folder.mkdir(parents=True)
        subprocess.run([IMAGE / "bin" / "python", "-m", "venv", "--without-pip", root / "python"], check=True)
        _add(root / "python", image)
        self.python = str(root / "python" / "bin" / "python")
        self.env = {
            "PATH": f"{Path(self.python).parent}:/usr/bin:/bin",
            "HOME": str(root / "home"),
            "JUPYTER_PATH": str(IMAGE / "share" / "jupyter"),
            "KAGGLE_KERNEL_RUN_TYPE": "Batch",
            "LABKIT_KAGGLE_ROOT": str(self.root),
            # this machine's processes are older than Kaggle's
            "LABKIT_SESSION_SECONDS": "1000000000",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in the working folder, without a network if this machine lets us take it away."""
        cut = ["unshare", "-rn", self.python, str(OFFLINE)]
        env = self.env
        if subprocess.run([*cut, "true"], capture_output=True).returncode:
            cut, env = [], env | dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
        whole = [*cut, self.python, *command]
        return subprocess.run(whole, cwd=self.working, env=env, capture_output=True, text=True)

    def save_and_run_all(self, notebook: Path, *options: str) -> str:
        """Export a notebook, run it as Kaggle does, and return its log."""
        folder = self.root.parent / "exported"
        assert main(["kaggle", "export", str(notebook), "--user", "me", "--into", str(folder), *options]) == 0
        shutil.copyfile(folder / notebook.name, self.working / "__notebook__.ipynb")
        papermill = ["-m", "papermill", "--log-output", "--no-progress-bar", "--kernel", "python3"]
        done = self.run(*papermill, "__notebook__.ipynb", "__notebook__.ipynb")
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stdout + done.stderr


@pytest.fixture
def session(tmp_path: Path, image: list[str]) -> Session:
    made = Session(tmp_path / "one", image)
    assert "No module named 'labkit'" in made.run("-c", "import labkit").stderr
    return made


def facts_in(log: str) -> list[dict[str, Any]]:
    return [found[1] for line in log.splitlines() if (found := read_progress_line(line))]


def written(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_a_lab_runs_as_save_and_run_all_runs_it_and_its_runs_are_like_others(session, monkeypatch) -> None:
    log = session.save_and_run_all(ROOT / "notebooks" / "03_ddp.ipynb", "-p", "nproc_per_node", "2")

    assert "pip could not" not in log
    assert "not installed here" not in log
    for package in ("labkit", "labkit_labs"):
        assert (_site(session.root.parent / "python") / package).is_dir()
    told = facts_in(log)
    book = nbformat.read(session.working / "__notebook__.ipynb", 4)
    assert "widgets" not in book.metadata
    assert not any("widget" in kind for c in book.cells for o in c.get("outputs", ()) for kind in o.get("data", ()))
    # Kaggle then makes a page of it
    done = session.run("-m", "nbconvert", "--to", "html", "__notebook__.ipynb")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "data:image/png;base64" in (session.working / "__notebook__.html").read_text()
    monkeypatch.setenv("LABKIT_RUNS", str(session.working / "runs"))
    runs = labkit.runs()
    assert {run.status().state for run in runs} == {"succeeded"}
    assert {facts["run"] for facts in told} == {run.id for run in runs}
    assert main(["compare", runs[0].id]) == main(["report", runs[0].id]) == main(["timeline", runs[0].id]) == 0
    assert runs[0].folder.read_manifest().versions["torch"].startswith(TORCH)


def test_a_script_of_ones_own_trains_by_the_exported_notebook(session, tmp_path) -> None:
    session.save_and_run_all(own_project(tmp_path / "mine"))

    assert all(text in shown_in(session.working / "__notebook__.ipynb") for text in SHOWN)


def test_a_script_of_ones_own_trains_by_the_editors_cell(session, tmp_path, capsys) -> None:
    """The wheel lies in a stand-in for /kaggle/input, whose path takes its place in the printed cell."""
    session.env |= {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
    wheel = session.root / "input" / "datasets" / "me" / "labkit-wheel"
    assert main(["kaggle", "dataset", "--user", "me", "--into", str(wheel)]) == 0
    capsys.readouterr()
    assert main(["kaggle", "cell"]) == 0
    cell = capsys.readouterr().out.replace('glob(f"/{', f'glob(f"{session.root.parent}/{{')
    own_project(session.working)
    own_cells(session.working / "editor.ipynb", cell, PROJECTS_LAUNCH, SHOW)

    done = session.run("-m", "papermill", "--kernel", "python3", "editor.ipynb", "executed.ipynb")

    assert done.returncode == 0, done.stderr[-5000:]
    shown = shown_in(session.working / "executed.ipynb")
    assert "has all packages that it needs here." in shown
    assert all(text in shown for text in SHOWN)


LAUNCH = "import labkit\nrun = labkit.launch('single', nproc_per_node=1, steps=2, global_batch_size=4)"


def test_where_pip_can_install_nothing_the_ranks_find_labkit_all_the_same(session, tmp_path) -> None:
    session.env |= {"PIP_TARGET": str(tmp_path / "elsewhere")}

    log = session.save_and_run_all(written(tmp_path / "small.ipynb", "x = 1", LAUNCH))

    assert "labkit: pip could not install it (it is not on sys.path); it is used from" in log
    assert '"state": "succeeded", ' in log


TRAIN = """
import labkit
from labkit.kaggle import previous_checkpoints
run = labkit.launch("ddp", steps=steps, global_batch_size=4, checkpoint_dir=previous_checkpoints())
print(run.logs(rank=0))
"""


def test_a_training_is_saved_before_its_session_ends_and_the_next_goes_on(session, image, tmp_path) -> None:
    began = min(process.create_time() for process in psutil.Process().parents())
    session.env["LABKIT_SESSION_SECONDS"] = str(time.time() - began + 120)
    notebook = written(tmp_path / "long.ipynb", "steps = 1_000_000", TRAIN)

    log = session.save_and_run_all(notebook)

    assert "Kaggle sessions are limited: this run saves and stops after " in log
    assert "stopped by the deadline after step" in log
    (saved, *_) = sorted(int(p.name[5:]) for p in (session.working / "checkpoints").glob("step-*"))
    again = Session(tmp_path / "two", image)
    shutil.copytree(session.working, again.root / "input" / "notebooks" / "me" / "labkit-long")

    log = again.save_and_run_all(notebook, "-p", "steps", str(saved + 3))

    assert facts_in(log)[-1]["step"] == saved + 3
    assert labkit.attach("latest", runs_dir=again.working / "runs").metrics()["step"].min() == saved + 1


@pytest.mark.timeout(3600)
def test_launch_and_parity_hold_with_kaggles_torch(session, tmp_path) -> None:
    """Without Lightning and accelerate, and with a network: those tests look at the machine's interfaces."""
    name, content = wheel()
    (tmp_path / name).write_bytes(content)
    pip = [session.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(tmp_path / name)]
    subprocess.run(pip, check=True)
    torchrun = Path(session.python).with_name("torchrun")  # packages that are shared bring no commands
    torchrun.write_text(f"#!{session.python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    tests = ["tests/integration/test_launch.py", "tests/strategies/test_parity.py", "-k", "not frameworks"]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LABKIT_RUNS")}

    done = subprocess.run(
        [session.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )

    print(done.stdout[-3000:])
    assert done.returncode == 0

"""The guest of one rank, without torchrun: what it leaves in the script's interpreter, and what it writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.launcher.warm.process import write_starting_files
from labkit.rank_files import FOLDER, GUEST, HIDDEN, RankFile
from labkit.record import RunFolder
from labkit.worker.guest import as_json, cut, first_word

LABKIT = Path(labkit.__file__).parents[1]
INSTALLED = [shutil.which(f"python{version}") for version in ("3.12", "3.13")]
INSTALLED += [str(path) for path in Path.home().glob(".pyenv/versions/3.1[23].*/bin/python")]
OTHER_PYTHONS = [
    path for path in INSTALLED if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0
]
LOOKS = """
import sys; print(sorted(sys.modules), sys.argv, sys.path[0])
import inspect, traceback, threading, atexit, os
print([frame.function for frame in inspect.stack()], [thread.name for thread in threading.enumerate()])
print(sys._getframe().f_back, __name__)
atexit.register(print, "atexit")
class D:
    def __del__(self): print("deleted")
d = D()
kept = open("kept", "w"); kept.write("kept")
def f(): traceback.print_stack(); raise ValueError("boom")
f()
"""


def run(folder: RunFolder, text: str, *args: str, python: str = sys.executable, cwd: Path) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a script under the guest."""
    folder.path.mkdir(parents=True, exist_ok=True)
    script = cwd / "train.py"
    script.write_text(text)
    folder.script.write_text(text)
    if python == sys.executable:
        write_starting_files(folder)
    else:
        code = "import sys; from labkit.launcher.warm import process; from labkit.record import RunFolder; "
        code += "process.write_starting_files(RunFolder(sys.argv[1]))"
        subprocess.run([python, "-c", code, str(folder.path)], cwd=LABKIT, check=True)
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {FOLDER: str(folder.path), HIDDEN: "SECRET_OF_OURS", "SECRET_OF_OURS": "1"}
    command = [python, "-u", str(folder.guest), "train.py", *args]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=100)
    assert (done.stdout, done.stderr) == (b"", b"")
    return done.returncode, folder.log(0).read_text(), folder.log(0, "stderr").read_text()


def records(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.metrics(0).read_text().splitlines()]


@pytest.mark.parametrize("python", [sys.executable, *OTHER_PYTHONS], ids=lambda path: "-".join(Path(path).parts[-3:]))
def test_a_script_is_the_same_program_in_every_python(python, folder, tmp_path):
    (theirs := tmp_path / "theirs").mkdir()
    (ours := tmp_path / "ours").mkdir()
    (theirs / "train.py").write_text(LOOKS)
    bare = subprocess.run([python, "-u", "train.py", "a"], cwd=theirs, capture_output=True, text=True, timeout=60)

    code, out, err = run(folder, LOOKS, "a", python=python, cwd=ours)

    assert (code, out.replace("ours", "theirs"), err.replace("ours", "theirs")) == (1, bare.stdout, bare.stderr)
    assert (ours / "kept").read_text() == "kept"
    error = json.loads(folder.error(0).read_text())
    assert (error["exception"], error["message"], error["script_line"]) == ("ValueError", "boom", 11)


def test_with_torch_only_labkits_own_modules_are_loaded(folder, tmp_path):
    text = "import torch, sys, json\nprint(json.dumps(sorted(sys.modules)))\n"
    bare = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)

    _, out, _ = run(folder, text, cwd=tmp_path)

    more = {*json.loads(out)} - {*json.loads(bare.stdout)}
    assert more
    assert {name for name in more if name.partition(".")[0] != "labkit"} == set()


def test_its_settings_are_gone_before_the_first_line(folder, tmp_path):
    text = f"import os\nprint([n for n in os.environ if n.startswith({GUEST!r}) or n == 'SECRET_OF_OURS'])\n"

    assert run(folder, text, cwd=tmp_path)[1] == "[]\n"


def test_a_script_without_torch_leaves_a_heartbeat_and_its_end(folder, tmp_path):
    assert run(folder, "x = 1\n", cwd=tmp_path)[0] == 0

    beat = json.loads(folder.heartbeat(0).read_text())
    assert (beat["step"], beat["doing"], beat["dumps"]) == (0, "preparing", True)
    (end,) = records(folder)
    assert (end["k"], end["outcome"], end["step"]) == ("end", "finished", 0)


def test_a_forked_child_is_not_the_rank(folder, tmp_path):
    text = """
import os, sys, torch, time
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward(); optimizer.step(); time.sleep(.06)
train(4)
if not (child := os.fork()):
    train(40)
    sys.exit("the child's own")
os.waitpid(child, 0)
"""
    code, _, err = run(folder, text, cwd=tmp_path)

    assert (code, err) == (0, "the child's own\n")
    assert records(folder)[-1]["step"] == 4
    assert max(record.get("step", 0) for record in records(folder)) == 4
    assert sum(record["k"] == "end" for record in records(folder)) == 1
    assert not folder.error(0).exists()


def test_a_script_that_executes_itself_again_is_recorded_again(folder, tmp_path):
    text = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv])
import torch
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward(); optimizer.step()
print(sys.argv, [name for name in os.environ if "GUEST" in name])
raise ValueError("boom after exec")
"""
    code, out, _ = run(folder, text, "a b", cwd=tmp_path)

    assert (code, out) == (1, "['train.py', 'a b'] []\n")
    assert records(folder)[-1]["step"] == 3
    assert json.loads(folder.error(0).read_text())["message"] == "boom after exec"


def test_where_the_scripts_modules_hide_pythons_own_the_failure_is_recorded_all_the_same(folder, tmp_path):
    (tmp_path / "json.py").write_text("mine = 1\n")
    (tmp_path / "re.py").write_text("raise RuntimeError('never imported')\n")

    code, _, err = run(folder, "import json\njson.mine\ndef f(): raise KeyError('k')\nf()\n", cwd=tmp_path)

    assert code == 1
    assert err.endswith("KeyError: 'k'\n")
    error = json.loads(folder.error(0).read_text())
    assert (error["kind"], error["exception"], error["message"], error["script_line"]) == (
        "exception",
        "KeyError",
        "'k'",
        3,
    )


def test_a_module_of_the_script_that_is_called_labkit_is_not_recorded_and_says_why(folder, tmp_path):
    (tmp_path / "labkit.py").write_text("MINE = 1\n")
    text = "import labkit, torch, time\nprint(labkit.MINE)\ntime.sleep(1.5)\n"

    assert run(folder, text, cwd=tmp_path)[:2] == (0, "1\n")

    assert "hides labkit" in json.loads(folder.heartbeat(0).read_text())["problem"]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["python", "train.py", "a"], 1),
        (["python", "-u", "-X", "dev", "-W", "ignore", "train.py"], 6),
        (["python", "-m", "package", "a"], 1),
        (["python", "-c", "print()"], 0),
        (["python", "-"], 0),
        (["python"], 0),
    ],
)
def test_the_script_in_a_command_of_pythons(command, place):
    assert first_word(command) == place


def test_a_record_is_a_line_of_json_whatever_its_texts_hold():
    record = {"a": 1, "b": 0, "c": None, "d": True, "e": False, "f": 1.5, "g": 'x"\\\n\0ü\udce9'}

    line = as_json(record)

    assert json.loads(line) == record | {"g": 'x"\\??ü?'}
    assert line.count(b"\n") == 1


def test_a_text_of_a_heartbeat_is_cut_between_characters():
    assert cut("a" * 80) == "a" * 80
    assert cut("a" + "ü" * 80) == "a" + "ü" * 49
    assert cut("caf\udce9") == "caf?"


def test_a_file_is_out_of_the_scripts_way_and_is_opened_again_when_its_descriptor_is_anothers(tmp_path):
    file = RankFile(str(tmp_path / "records"))
    first = file.descriptor
    assert first > 900
    assert not os.get_inheritable(first)
    file.write(b"one\n")
    other = os.open(tmp_path / "theirs", os.O_CREAT | os.O_WRONLY)
    os.dup2(other, first)

    file.write(b"two\n")

    assert (tmp_path / "records").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "theirs").read_bytes() == b""
    for descriptor in (other, first, file.descriptor):
        os.close(descriptor)


def test_looking_at_a_script_that_imports_torch_imports_nothing_at_the_same_time():
    looks = """
import _thread, time
from labkit.worker.guest import whereabouts
main, looks, pooled = _thread.get_ident(), [], {}
def look():
    while True:
        looks.append(whereabouts(main, __file__))
        time.sleep(0.0005)
_thread.start_new_thread(look, ())
import torch.distributed
print(len(looks) > 20)
from multiprocessing.pool import Pool, ThreadPool
for kind in (ThreadPool, Pool):
    looks.clear()
    with kind(1) as pool:
        pool.map(time.sleep, [0.2])
    print(any(look["pooled"] for look in looks))
"""
    path = {"PYTHONPATH": str(LABKIT)}
    done = subprocess.run(
        [sys.executable, "-c", f"__file__ = '<string>'{looks}"], env=os.environ | path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stderr

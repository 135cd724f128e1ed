"""What a person may hand to labkit by mistake: refused in words before anything exists, or taken as it was meant."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.errors import LabError, LaunchError
from labkit.hardware.machine import Hardware, usable_cores
from labkit.machine import Machine

ID = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9][A-Za-z0-9._-]{0,59}-[0-9a-f]{4}")
OPTIONS = (
    "import argparse\n"
    "parser = argparse.ArgumentParser()\n"
    'parser.add_argument("--hf-token")\n'
    'parser.add_argument("--wandb-api-key")\n'
    'parser.add_argument("--text")\n'
    "parser.parse_args()\n"
)


@pytest.fixture
def nowhere(tmp_path):
    """An environment in which no interpreter starts: whatever a launch gets past its checks, no rank ever runs."""
    return {"PYTHONHOME": str(tmp_path / "nowhere")}


@pytest.fixture
def launched(nowhere):
    """`launched(script, …)`: a launch up to its supervisor, which cannot start."""

    def launch(script, *, env=None, **arguments):
        return labkit.launch(script, wait=False, env=nowhere | (env or {}), **arguments)

    return launch


@pytest.fixture
def refusal(launched, runs_dir):
    """`refusal(script, …)`: the words with which a launch is refused, after which nothing is there."""

    def words(script="ddp", **arguments):
        with pytest.raises(LabError) as raised:
            launched(script, **arguments)
        assert not runs_dir.exists() or not list(runs_dir.iterdir())
        return str(raised.value)

    return words


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OPTIONS)
    return path


@pytest.fixture
def make_run(runs_dir):
    """`make_run(id, text)`: a run folder that holds that run.json."""

    def make(name, text='{"format": 1, "name": "ddp", "world_size": 1}'):
        path = runs_dir / name
        path.mkdir(parents=True)
        (path / "run.json").write_text(text)
        return path

    return make


@pytest.mark.parametrize("value", [2.5, True, None, "2", "", "gpu", [2], {}, float("nan")], ids=repr)
def test_an_invalid_number_of_ranks_raises(refusal, value):
    assert refusal(nproc_per_node=value) == f"nproc_per_node must be an integer or 'auto', got {value!r}"


def test_a_negative_number_of_ranks_raises(refusal):
    assert refusal(nproc_per_node=-(10**30)) == f"nproc_per_node must be at least 1, got {-(10**30)}"


def test_many_more_ranks_than_cores_start_with_a_warning(launched, train, capsys):
    ranks = 2 * usable_cores() + 1

    launched(train, nproc_per_node=ranks, env={"CUDA_VISIBLE_DEVICES": ""})

    assert f"{ranks} ranks on {usable_cores()} cores: they start one at a time" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "7", "0,0", "-1", "MIG-0a1b2c3d-0000-0000-0000-000000000000"])
@pytest.mark.parametrize("place", ["given", "set"])
def test_what_hides_the_gpus_is_named_where_nccl_is_asked_for(refusal, monkeypatch, value, place):
    if place == "set":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    given = {"CUDA_VISIBLE_DEVICES": value} if place == "given" else {}

    said = refusal(nproc_per_node=2, backend="nccl", env=given)

    assert f"(CUDA_VISIBLE_DEVICES={value!r})" in said
    assert "Leave backend out" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty; expected a Python script"),
        (b"\xef\xbb\xbf \r\n", "is empty; expected a Python script"),
        (
            "name = 'Müller'\n".encode("latin-1"),
            "cannot be decoded: invalid or missing encoding declaration. Save it as",
        ),
        ("x = 1\n".encode("utf-16"), "cannot be decoded: invalid or missing encoding declaration. Save it as UTF-8"),
        (b"# coding: klingon\nx = 1\n", "cannot be decoded: unknown encoding: klingon. Save it as UTF-8"),
        (b"# coding: rot13\nx = 1\n", "cannot be decoded: 'rot13' is not a text encoding"),
        (b"x = 1\n" * 4 + b"# \xff\n", "cannot be decoded: 'utf-8' codec can't decode byte 0xff"),
        (b"#" + b" " * (9 << 20), "has 9,437,185 bytes; expected a Python script of at most 8,388,608 bytes"),
        (b"x = 1\0\n", "cannot be compiled"),
    ],
    ids=["empty", "byte order mark alone", "latin-1", "utf-16", "unknown", "rot13", "later line", "huge", "NUL"],
)
def test_a_file_that_is_no_script_is_refused(refusal, train, content, says):
    train.write_bytes(content)

    said = refusal(train)

    assert says in said
    assert "train.py" in said


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("pipe", os.mkfifo, "is a named pipe; expected a Python script"),
        ("null", lambda path: path.symlink_to("/dev/null"), "is a device; expected a Python script"),
        ("zero.py", lambda path: path.symlink_to("/dev/zero"), "is a device; expected a Python script"),
        (
            "lab.ipynb",
            lambda path: path.write_text('{"cells": []}'),
            "is a notebook; expected a Python script. Make one",
        ),
        ("gone.py", lambda path: path.symlink_to("nowhere.py"), "(a link to nowhere.py, which does not exist)"),
    ],
)
@pytest.mark.parametrize(
    "take",
    [
        labkit.Script.load,
        labkit.plan,
        lambda path: labkit.launch(path, nproc_per_node=1),
        lambda path: labkit.sweep(path, lr=[1, 2]),
        lambda path: labkit.submit(path, time="10", nproc_per_node=1),
    ],
    ids=["load", "plan", "launch", "sweep", "submit"],
)
def test_whatever_takes_a_script_refuses_what_is_not_one_without_waiting(tmp_path, runs_dir, name, make, says, take):
    make(tmp_path / name)

    with pytest.raises(LabError, match=re.escape(says)):
        take(tmp_path / name)

    assert not runs_dir.exists()


def test_a_folder_is_no_script(refusal, tmp_path):
    (tmp_path / "train.py").mkdir()

    assert refusal(tmp_path / "train.py") == f"{tmp_path / 'train.py'} is a folder; expected a Python script"


@pytest.mark.parametrize("name", ["x" * 300 + ".py", "gone/train.py", "train.py/train.py", "a\0b.py", "loop.py"])
def test_a_path_without_a_file_raises(refusal, train, name):
    (train.parent / "loop.py").symlink_to("loop.py")

    said = refusal(str(train.parent / name))

    assert "script not found" in said
    assert name.replace("\0", "") in said.replace("\0", "").replace("\\x00", "")


def test_a_launch_of_nothing_is_refused(refusal):
    assert refusal(None) == "launch takes either a script or module=…, got script=None and module=None"


@pytest.mark.parametrize("script", [b"train.py", 3.0, ["train.py"]], ids=repr)
def test_what_is_neither_a_script_nor_a_path_is_refused(refusal, script):
    assert refusal(script) == f"launch takes a Script, the name of one, or a path; got {script!r}"


@pytest.mark.parametrize("content", [OPTIONS.replace("\n", "\r\n"), "\ufeff" + OPTIONS], ids=["CRLF", "BOM"])
def test_windows_line_ends_and_a_byte_order_mark_are_accepted(launched, train, content):
    train.write_text(content, encoding="utf-8", newline="")

    assert str(launched(train, text="x").script) == OPTIONS


@pytest.mark.parametrize(
    "name",
    ["-x.py", "--help.py", "a b.py", """it's "quoted".py""", "$(touch owned).py", "a;b&c|d.py", "a\nb.py", "ключ.py"]
    + ["🔥.py", "e\u0301.py", "*.py", "%s {0}.py", "~.py", "x" * 250 + ".py", "back\\slash.py"],
    ids=ascii,
)
@pytest.mark.parametrize("form", ["absolute", "relative"])
def test_a_script_of_any_name_is_started_by_the_name_that_was_given(launched, tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(OPTIONS)
    given = str(tmp_path / name) if form == "absolute" else name

    run = launched(given, nproc_per_node=1, args=["--text", "a b"])

    expected = [f"./{given}" if given.startswith("-") else given, "--text", "a b"]  # torchrun takes -x for an option
    assert shlex.split(run.command)[-3:] == expected
    assert [*run.folder.read_manifest().torchrun[-3:]] == expected
    assert ID.fullmatch(run.id)


def test_a_script_whose_name_is_not_utf8_is_accepted_or_refused_in_words(launched, tmp_path, runs_dir):
    path = tmp_path / os.fsdecode(b"caf\xe9.py")
    path.write_text(OPTIONS)

    try:
        run = launched(path, nproc_per_node=1)
    except LabError as refused:
        assert "UTF-8" in str(refused)
        assert not runs_dir.exists() or not list(runs_dir.iterdir())
    else:
        assert run.folder.read_manifest().torchrun[-1] == str(path)


@pytest.mark.parametrize(
    "name", ["../../etc/x", "", "a\0b", "a\nb", "x" * 300], ids=lambda name: ascii(name[:20])
)  # each of them: test_folder.py
def test_a_run_of_any_name_lies_in_the_runs_folder_and_is_shown_by_its_own(launched, train, runs_dir, capsys, name):
    run = launched(train, nproc_per_node=1, name=name)

    assert list(runs_dir.iterdir()) == [run.path]
    assert ID.fullmatch(run.id)
    assert capsys.readouterr().out.startswith(f"{run.id} started")
    assert labkit.attach(run.id).path == labkit.attach("latest").path == run.path


def root_of(kind, folder):
    path = folder / "the-root"
    if kind == "file":
        path.write_text("")
    elif kind == "below a file":
        (folder / "file").write_text("")
        path = folder / "file" / "the-root"
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link to nothing":
        path.symlink_to(folder / "gone" / "for good")
    elif kind == "too long":
        path = folder / ("the-root" + "x" * 300)
    elif kind == "NUL":
        path = folder / "the-root\0"
    return path


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("file", "the-root: it is a file, expected a folder"),
        ("below a file", "Not a directory"),
        *((kind, "") for kind in ("loop", "link to nothing", "too long", "NUL")),
    ],
)
def test_a_root_where_no_run_can_be_kept_is_named_with_what_to_do(launched, train, tmp_path, kind, why):
    with pytest.raises(LabError) as raised:
        launched(train, runs_dir=root_of(kind, tmp_path))

    assert "runs cannot be stored in" in str(raised.value)
    assert why in str(raised.value)
    assert "the-root" in str(raised.value)
    assert "runs_dir=" in str(raised.value)


@pytest.mark.parametrize("kind", ["file", "loop", "link to nothing", "too long", "NUL"])
def test_a_root_where_no_run_can_be_has_none(tmp_path, kind):
    root = root_of(kind, tmp_path)

    assert repr(labkit.runs(runs_dir=root)) == "no runs yet"
    with pytest.raises(LabError, match="no run in"):
        labkit.attach(runs_dir=root)


@pytest.mark.parametrize(
    "which", ["x" * 300, "a\0b", "../..", "/", "no/such/run", None, 3, b"latest"], ids=lambda which: ascii(which)[:20]
)
def test_a_run_that_is_asked_for_in_nonsense_is_not_found_in_words(make_run, which):
    make_run("20250101T000000Z-ddp-0001")

    with pytest.raises(LabError, match="run"):
        labkit.attach(which)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": -1}, "steps must be 0 or more, got -1"),
        ({"epochs": "-3"}, "epochs must be 0 or more, got -3"),
        ({"save_every": -5}, "save_every must be 0 or more, got -5"),
        ({"lr": -1e-3}, "lr must be 0 or more, got -0.001"),
        ({"lr": float("nan")}, "lr of ddp.py must be a number; got nan"),
        ({"lr": "nan"}, "lr of ddp.py must be a number; got 'nan'"),
        ({"lr": "inf"}, "lr of ddp.py must be a number; got 'inf'"),
        ({"lr": "1e-3x"}, "lr of ddp.py must be a number; got '1e-3x'"),
        ({"steps": "1e3"}, "steps of ddp.py must be an integer; got '1e3'"),
        ({"args": ["--lr", "nan"]}, "lr must be 0 or more, got nan"),
        ({"args": ["--lr=1e999"]}, "lr must be 0 or more, got 1e999"),
        ({"args": ["--steps", "ten"]}, "steps must be a number, got 'ten'"),
        ({"args": ["--steps", "-3"]}, "steps must be 0 or more, got -3"),
        ({"args": ["--steps"]}, "steps must be a number, got ''"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"global_batch_size": "-64"}, "global_batch_size must be 0 or more, got -64"),
        ({"global_batch_size": 64.0}, "global_batch_size of ddp.py must be an integer; got 64.0"),
        ({"accumulate": 0}, "global_batch_size and accumulate must be at least 1"),
        (
            {"accumulate": 7},
            "global_batch_size=64 cannot be split evenly into 2 data ranks x 7 micro-batches; "
            "the nearest sizes are 56 or 70",
        ),
        (
            {"global_batch_size": 65},
            "global_batch_size=65 cannot be split evenly into 2 data ranks; the nearest sizes are 64 or 66",
        ),
        ({"global_batch_size": 10**30 + 1}, f"the nearest sizes are {10**30} or {10**30 + 2}"),
    ],
    ids=repr,
)
def test_a_number_out_of_range_is_refused_by_labkits_own_scripts(refusal, given, says):
    assert says in refusal("ddp", nproc_per_node=2, **given)


@pytest.mark.parametrize(
    ("script", "given", "says"),
    [
        ("single", {}, "single trains on one rank, got 2; ddp is the simplest strategy for several ranks"),
        ("hybrid", {"tensor": 3}, "2 ranks cannot be split into pipeline=1 x tensor=3"),
        ("fsdp", {"replicas": 3}, "2 ranks cannot be split into replicas=3"),
        ("context_parallel", {"context_ranks": 3}, "2 ranks cannot be split into sequences of context_ranks=3"),
    ],
)
def test_a_launch_refuses_in_the_words_of_a_plan(refusal, script, given, says):
    assert says in refusal(script, nproc_per_node=2, **given)
    with pytest.raises(LaunchError, match=says):
        labkit.plan(script, nproc_per_node=2, **given)


@pytest.mark.parametrize(
    ("given", "argv"),
    [
        ({"lr": "1e-3"}, ["--lr", "1e-3"]),
        ({"steps": 0}, ["--steps", "0"]),
        ({"steps": 10**12}, ["--steps", "1000000000000"]),
        ({"lr": 0}, ["--lr", "0"]),
    ],
    ids=repr,
)
def test_a_number_in_range_reaches_the_script_as_it_was_written(launched, given, argv):
    assert shlex.split(launched("ddp", nproc_per_node=2, **given).command)[-2:] == argv


@pytest.mark.parametrize("names", [["batch_size"], ["bathc_size", "learning_rates"], ["__class__"], ["steps "]])
def test_unknown_parameters_are_named_with_those_there_are(refusal, names):
    said = refusal("ddp", **dict.fromkeys(names, 2))

    assert f"ddp.py takes no parameter {names[0]!r}" in said
    assert "It takes: epochs, steps, global_batch_size" in said


def test_a_name_of_no_script_and_an_option_of_an_extra_that_cannot_be_added_are_refused(refusal):
    mine = labkit.Script.load("zero1").with_cells(checkpoints="class Checkpoints:\n    pass\n")

    assert "no script named 'ddpp'; did you mean 'ddp'?" in refusal("ddpp")
    assert "the extra ddp_options works with ddp, not with zero1" in refusal("zero1", static_graph=True)
    assert "replaces the 'checkpoints' cell, and this script has your own" in refusal(mine, save_every=5)
    assert "the 'step' cell, and this script has your own" in refusal(
        mine.with_cells(step=mine.cells["step"].text + "\nMINE = 1\n"), args=["--accumulate", "2"]
    )


@pytest.mark.parametrize(
    "value",
    ["""it's "q" \\ \n $(x) `y` %s""", "", " ", "é🔥", "-rf", "--steps", "x" * 90_000],
    ids=lambda value: ascii(value[:20]),
)
def test_a_parameter_of_any_text_is_kept_and_written_as_it_was_given(launched, train, value):
    run = launched(train, nproc_per_node=1, text=value)
    words = shlex.split(run.command)

    assert words[words.index(str(train)) + 1 :] in (["--text", value], [f"--text={value}"])
    assert run.folder.read_manifest().parameters == {"text": value}


@pytest.mark.parametrize("value", ["x" * 200_000, "a\0b", "\udcff"], ids=["too long", "NUL", "not UTF-8"])
def test_a_parameter_that_no_process_can_be_given_is_refused(refusal, train, value):
    said = refusal(train, text=value)

    assert "cannot be passed to a process" in said
    assert "text" in said
    assert len(said) < 1000


@pytest.mark.parametrize("name", ["hf_token", "wandb_api_key"])
def test_a_parameter_that_looks_like_a_secret_is_refused_without_its_value(refusal, train, name):
    said = refusal(train, **{name: "abc123"})

    assert "looks like a secret" in said
    assert "env=" in said
    assert "abc123" not in said


@pytest.mark.parametrize("env", ["A=1", ["A=1"], 3], ids=repr)
def test_an_environment_that_is_not_a_mapping_raises(env):
    with pytest.raises(LaunchError, match="env must be"):
        labkit.launch("ddp", wait=False, env=env)


def test_leftovers_of_another_launcher_are_named_and_their_values_kept_nowhere(launched, train, monkeypatch):
    for name in ("PET_NNODES", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "left-over")

    run = launched(train, nproc_per_node=1)

    assert [*run.folder.read_manifest().env_dropped] == ["MASTER_ADDR", "PET_NNODES", "TORCHELASTIC_RUN_ID"]
    assert not [path for path in run.path.iterdir() if path.is_file() and b"left-over" in path.read_bytes()]


@pytest.mark.parametrize("name", ["PET_NPROC_PER_NODE", "PET_NNODES", "PET_MASTER_PORT"])
def test_what_would_change_the_launch_cannot_be_given_behind_its_back(refusal, name):
    assert name in refusal(nproc_per_node=2, env={name: "3"})


@pytest.mark.parametrize("value", ["eth9", "lo,eth9", "eth9,lo"])
@pytest.mark.parametrize("place", ["given", "set"])
def test_an_interface_that_is_not_there_is_named_with_those_that_are(refusal, monkeypatch, value, place):
    if place == "set":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)

    said = refusal(nproc_per_node=2, env={"GLOO_SOCKET_IFNAME": value} if place == "given" else {})

    assert "no interface eth9; this host has" in said
    assert all(name in said for name in psutil.net_if_addrs())


def test_an_interface_that_is_given_wins_over_one_that_is_set(launched, train, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    here = next(iter(psutil.net_if_addrs()))

    run = launched(train, nproc_per_node=1, env={"GLOO_SOCKET_IFNAME": here})

    assert run.folder.read_manifest().env["GLOO_SOCKET_IFNAME"] == here


def test_two_launches_in_one_second_are_two_runs(launched, train, runs_dir):
    runs = [launched(train, nproc_per_node=1, name="same") for _ in range(5)]

    assert len({run.id for run in runs}) == 5
    assert {run.id for run in labkit.runs()} == {run.id for run in runs} == {path.name for path in runs_dir.iterdir()}


@pytest.mark.parametrize(
    "text",
    ['{"format": 2}', "", "{", "null", "[]", "\x00" * 100, "[" * 100_000],
    ids=["newer", "empty", "torn", "null", "list", "zeros", "deep"],
)
def test_a_damaged_run_is_refused_and_hides_no_other(make_run, text):
    good, bad = make_run("20250101T000000Z-ddp-0001"), make_run("20260101T000000Z-ddp-0002", text)

    assert good.name in repr(labkit.runs())
    assert [run.id for run in labkit.runs()][-1] == good.name
    assert labkit.attach(good.name).path == good
    with pytest.raises(LabError, match=re.escape(f"{bad} is not a run folder this labkit can read")):
        labkit.attach("latest")
    with pytest.raises(LabError, match="not a run folder"):
        labkit.compare([good, bad])


def test_a_run_of_a_newer_labkit_says_which_one_wrote_it(make_run):
    make_run("20260101T000000Z-ddp-0002", json.dumps({"format": 2, "versions": {"labkit": "2.3.4"}}))

    with pytest.raises(LabError, match="format 2, expected format 1") as raised:
        labkit.attach("latest")

    assert "labkit 2.3.4" in str(raised.value)


def test_a_run_json_that_leads_out_of_the_root_is_not_followed(make_run, tmp_path):
    good = make_run("20250101T000000Z-ddp-0001")
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text('{"format": 1, "name": "elsewhere", "world_size": 1}')
    linked = make_run("20260101T000000Z-link-0002")
    (linked / "run.json").unlink()
    (linked / "run.json").symlink_to(elsewhere)

    assert [run.id for run in labkit.runs()] == [good.name]
    assert labkit.attach("latest").path == good
    with pytest.raises(LabError):
        labkit.attach("link")


def test_a_run_that_is_a_link_out_of_the_root_is_passed_over_by_latest(make_run, tmp_path, runs_dir):
    good = make_run("20250101T000000Z-ddp-0001")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.json").write_text('{"format": 1}')
    (runs_dir / "20260101T000000Z-link-0002").symlink_to(tmp_path / "elsewhere")

    assert labkit.attach("latest").path == good
    with pytest.raises(LabError, match="no run matches 'link'"):
        labkit.attach("link")


def machine(platform="linux", shared_memory=1 << 31, visible=None):
    return Machine(Hardware(platform, (), 2, 8 << 30, 4 << 30, shared_memory, visible))


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (machine(shared_memory=64 << 20), "--shm-size="),
        (machine(visible="7"), "CUDA_VISIBLE_DEVICES='7' determines the visible GPUs"),
        (machine(visible=""), "CUDA_VISIBLE_DEVICES='' determines the visible GPUs"),
        (machine(platform="windows"), "use WSL2"),
        (machine(platform="macos"), "train on the CPU with gloo"),
    ],
    ids=["small /dev/shm", "no such device", "no device", "Windows", "macOS"],
)
def test_the_doctor_says_what_will_go_wrong_on_a_made_up_machine(here, says):
    assert says in " ".join(str(here).split())
    assert says not in " ".join(str(machine()).split())


def test_the_doctor_names_what_another_launcher_has_left_over(monkeypatch):
    assert "PET_NNODES" not in str(machine())
    monkeypatch.setenv("PET_NNODES", "2")

    says = " ".join(str(machine()).split())
    assert "PET_NNODES (left over from another launcher; labkit does not pass them to ranks" in says


def test_the_doctor_warns_of_too_few_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert "ulimit -n" in str(machine())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

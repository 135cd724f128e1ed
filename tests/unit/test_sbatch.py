"""The launch file of a Slurm job: all of its text, and what odd names do to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labkit import LabError, LaunchError, Script
from labkit.cluster.jobs import plain_text, prepare_submission
from labkit.cluster.sbatch import NODE, JobOptions, LaunchFile, array_text, sbatch_text, seconds_of
from labkit.cluster.slurm import tasks_in
from labkit.launch_options import LaunchOptions

GOLDEN = Path(__file__).parent / "golden"
TWO_NODES = JobOptions(time="10", nodes=2, nproc_per_node=1)
RUN = "/home/ada/runs/20261122T120000Z-ddp-1234"
UNDER_LABKIT = LaunchFile(
    JobOptions(
        time="02:00:00",
        nodes=2,
        nproc_per_node=4,
        partition="gpu",
        account="lovelace",
        gpus_per_node=4,
        cpus_per_task=8,
    ),
    name="ddp",
    cwd="/home/ada/project",
    output=f"{RUN}/slurm.out",
    python="/opt/env/bin/python",
    program=[
        "--redirects",
        "3",
        "--log-dir",
        f"{RUN}/nodes/{NODE}/torchrun",
        "-m",
        "--",
        "labkit.worker",
        f"{RUN}/script.py",
        "--save-every",
        "100",
        "--checkpoint-dir",
        f"{RUN}/checkpoints",
    ],
    folder=RUN,
    checkpoints=f"{RUN}/checkpoints",
)


def with_options(file: LaunchFile, **options: object) -> LaunchFile:
    return replace(file, job=replace(file.job, **options))


PLAIN = replace(UNDER_LABKIT, folder=None, program=["--", "/home/ada/project/train.py", "--steps", "100"])
FILES = {
    "labkit": UNDER_LABKIT,
    "plain": PLAIN,
    "plain_once": with_options(
        replace(PLAIN, checkpoints=None),
        partition=None,
        account=None,
        gpus_per_node=0,
        setup="module load cuda",
        options=["--qos=high"],
    ),
    "one_node": with_options(replace(PLAIN, checkpoints=None), nodes=1),
}
ODD = [
    "two words",
    "it's",
    'a "quoted" word',
    "$HOME `id` $(id)",
    "a;b&c|d>e",
    "wild*card?[x]",
    "\\back\\slash",
    "#no",
    "~",
    "-rf",
    "{a,b}",
    "naïve Übung 分散 😀",
    "a!b",
    "100%j",
    "=",
    "",
    "a=b",
    "nb sp\u00a0ace",
]


@pytest.mark.parametrize("name", FILES)
def test_the_text_is_the_one_that_was_read_and_run(name):
    assert sbatch_text(FILES[name]) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
@pytest.mark.parametrize("word", ["", *ODD])
def test_bash_and_shellcheck_have_nothing_to_say(file, word, tmp_path):
    text = sbatch_text(with_word(file, word) if word else file)
    path = tmp_path / "job.sbatch"
    path.write_text(text, encoding="utf-8")

    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "--shell=bash", path], capture_output=True, text=True)
        assert not done.stdout


def with_word(file: LaunchFile, word: str) -> LaunchFile:
    folder = None if file.folder is None else f"/runs/{word}"
    checkpoints = None if file.checkpoints is None else f"/ckpt/{word}"
    program = [*file.program, word, f"--name={word}"]
    return replace(file, name=f"job {word}", cwd=f"/x/{word}", program=program, folder=folder, checkpoints=checkpoints)


@pytest.mark.parametrize("word", ODD)
def test_words_reach_the_command_as_they_were_given(word, tmp_path):
    file = replace(FILES["one_node"], program=["train.py", word, f"--name={word}"])

    assert started_by(sbatch_text(file), file.python, tmp_path)[-3:] == ["train.py", word, f"--name={word}"]


def started_by(text: str, python: str, tmp_path: Path) -> list[str]:
    """The arguments of `python` in a launch file's task, which bash runs with a program that prints them instead."""
    teller = tmp_path / "python"
    teller.write_text("#!/bin/sh\nexec python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n")
    teller.chmod(0o755)
    task = text[text.index("task() {") : text.index("export -f task")].replace(python, str(teller), 1)
    environment = {"SLURM_NODEID": "0", "HEAD": "a", "PORT": "1", "ATTEMPT": "1", "SLURMD_NODENAME": "a"}
    environment["PATH"] = "/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", f"{task}\ntask"], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("form", ["labkit", "plain"])
def test_torchruns_own_parser_reads_the_command_of_a_job_as_meant(form, tmp_path, monkeypatch):
    from torch.distributed.run import parse_args

    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("import sys\n")
    launch = LaunchOptions(args=["--log", "x", "--", "--nnodes=9"])
    job = replace(TWO_NODES, nodes=1)
    run = prepare_submission(script, launch, job, {}) if form == "labkit" else None

    text = run.launch_file.read_text() if run else plain_text(script, launch, job)
    command = started_by(text, sys.executable, tmp_path)
    read = parse_args(command[command.index("torch.distributed.run") + 1 :])

    assert read.training_script == str(run.guest if run else script)
    assert read.training_script_args[-4:] == launch.args


@pytest.mark.parametrize("bad", ["two\nlines", "a\rb", "a\0b", "\x1b[1m", "\ud800"])
@pytest.mark.parametrize("field", ["name", "cwd", "output", "partition", "checkpoints", "program", "options"])
def test_what_would_be_two_lines_is_refused(bad, field):
    value = [bad] if field in ("program", "options") else bad
    change = replace if hasattr(UNDER_LABKIT, field) else with_options
    with pytest.raises(LaunchError, match="cannot be used in a launch file|must be text|must be a list"):
        sbatch_text(change(UNDER_LABKIT, **{field: value}))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("02:00:00", 7200),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("2-0:0:1", 172_801),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["2h", "", "soon", "1-", "-5", "1:2:3:4", "00:00:00", "0", None, 1.5])
def test_what_is_no_time_limit_is_refused(text):
    with pytest.raises(LaunchError, match=r"time=.* (is not a Slurm time limit|must be greater than zero)"):
        seconds_of(text)


def test_a_job_that_could_not_save_before_its_end_is_refused():
    short = with_options(UNDER_LABKIT, time="00:02:00")
    with pytest.raises(LaunchError, match="too short to save: the job is notified 120 s before its end"):
        sbatch_text(short)
    assert "#SBATCH --signal" not in sbatch_text(replace(short, checkpoints=None))
    assert "--signal=B:USR1@30" in sbatch_text(with_options(short, saving_seconds=30))


def run_by_bash(folder: Path, job: int, code: int = 0, step: str = "") -> subprocess.CompletedProcess[str]:
    """The launch file of a run, with stand-ins for Slurm: `step` is what the ranks do before they end with `code`."""
    stand_ins = {"srun": f"{step}\nexit {code}", "scontrol": f'echo n1; echo "$1" >>{folder}/asked'}
    for name, script in stand_ins.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    text = sbatch_text(replace(UNDER_LABKIT, folder=str(folder), checkpoints=f"{folder}/checkpoints"))
    names = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "8"}
    environment = names | {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("code", "saves", "requeued"), [(143, True, True), (143, False, False), (0, True, False)])
def test_a_job_goes_back_into_the_queue_when_it_has_saved_and_is_not_done(code, saves, requeued, tmp_path):
    saved = tmp_path / "checkpoints" / "step-1"
    step = f"kill -USR1 $PPID; sleep 0.3; {f'mkdir -p {saved}; touch {saved}/COMMIT.json' if saves else ''}"

    assert run_by_bash(tmp_path, 42, code, step).returncode == code
    assert json.loads((tmp_path / "stop.json").read_text())["goes_on"] is True
    assert ("requeue" in (tmp_path / "asked").read_text().split()) is requeued


def test_a_run_has_one_job_however_often_its_file_is_submitted(tmp_path):
    assert run_by_bash(tmp_path, 42, 1).returncode == 1
    second = run_by_bash(tmp_path, 4)

    assert (second.returncode, second.stderr) == (1, "labkit: this run already has or had a job; submit a new run\n")
    assert json.loads((tmp_path / "slurm.json").read_text()) == {"job": "42"}
    (tmp_path / "stop.json").touch()
    assert run_by_bash(tmp_path, 42).returncode == 0  # restarted by Slurm
    assert not (tmp_path / "stop.json").exists()


@pytest.mark.parametrize("option", ["--output=x", "-ox", "--nodes=3", "-N3", "--no-requeue", "--array=1-3", "--ntasks"])
def test_what_the_launch_file_itself_says_is_no_further_option(option, runs_dir):
    with pytest.raises(LaunchError, match="conflicts with an option of the launch file"):
        prepare_submission("ddp", LaunchOptions(), replace(TWO_NODES, options=["--qos=high", option]), {})
    assert not list(runs_dir.glob("*"))


def test_a_job_of_labkit_s_own_script_can_save_and_resume():
    folder = prepare_submission("ddp", LaunchOptions(), TWO_NODES, {})

    assert Script.load(folder.script) == Script.load("ddp", "checkpoints")
    assert f"--checkpoint-dir {folder.checkpoints}" in folder.launch_file.read_text()


def test_a_plain_launch_file_has_labkit_s_own_script_written_beside_it(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    saves = LaunchOptions(args=["--checkpoint-dir", "saved"])

    text = plain_text("ddp", saves, TWO_NODES)

    written = Script.load(tmp_path / "ddp.py")
    assert written == Script.load("ddp", "checkpoints")
    assert f"{tmp_path / 'ddp.py'} --checkpoint-dir saved" in text
    assert f"{tmp_path / 'ddp.py'}: the script that the launch file runs" in capsys.readouterr().err
    with pytest.raises(LabError, match="exists and differs"):
        plain_text("ddp", LaunchOptions(), TWO_NODES)


def test_a_user_s_usual_account_and_partition_are_taken_unless_others_are_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBATCH_ACCOUNT", "usual")
    monkeypatch.setenv("SBATCH_PARTITION", "usual-nodes")
    text = plain_text("ddp", LaunchOptions(), replace(TWO_NODES, account="other"))
    assert "#SBATCH --account=other\n" in text
    assert "#SBATCH --partition=usual-nodes\n" in text


@pytest.mark.parametrize("words", ["plain", 'odd "name" $HOME `id` é'])
def test_a_task_of_an_array_runs_the_launch_file_of_its_point_and_no_other(tmp_path, words):
    folder = tmp_path / words
    folder.mkdir()
    files = [folder / f"{i}.sbatch" for i in range(3)]
    for i, file in enumerate(files):
        file.write_text(f"echo point {i} $$\n")
    job = JobOptions(time="10", nproc_per_node=1, cpus_per_task=1)
    one = LaunchFile(job, name="sweep", cwd="/", output=str(folder / "slurm"), python="python", program=())
    array = folder / "array.sbatch"
    array.write_text(array_text(one, "0-2%2", list(map(str, files))))

    assert "#SBATCH --array=0-2%2" in array.read_text()
    assert "slurm-%A-%a.out" in array.read_text()
    for i in range(3):
        process = subprocess.Popen(
            ["bash", array], stdout=subprocess.PIPE, env={"SLURM_ARRAY_TASK_ID": str(i)}, text=True
        )
        assert process.communicate()[0] == f"point {i} {process.pid}\n"  # the same process, so signals reach it


def test_the_tasks_that_slurm_names_together():
    assert tasks_in("0,3-5,8-12:2%4") == [0, 3, 4, 5, 8, 10, 12]
    assert tasks_in("7") == [7]
    assert tasks_in("") == []

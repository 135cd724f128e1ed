"""What is handed over to Kubeflow and SkyPilot as text: their own schemas, a shell and YAML's reader take it."""

import shutil
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from labkit.cli import main
from labkit.cluster.handover import CHECKPOINTS, hand_over
from labkit.cluster.kubeflow import trainjob
from labkit.cluster.skypilot import sky_task
from labkit.cluster.yaml import block, scalar
from labkit.errors import LabError

ODD = [
    "a b", "it's", '"', "$HOME", "$(whoami)", "$$X $$(id) $$", "`id`", "yes", "null", "3", "1e3", "#", "a: b", "- a",
    "*", "é", "\\n",
]  # fmt: skip


@pytest.fixture
def odd(tmp_path):
    """A user's script whose name and text want quoting everywhere."""
    path = tmp_path / "Träin it's $(now).py"
    path.write_text("# 'a' \"b\" $HOME\nEND_OF_SCRIPT = '''\nEND_OF_SCRIPT\n'''\n\tx = 1\n".replace("\tx", "x"))
    return path


def documents(text):
    return list(yaml.safe_load_all(text))


def kubeflow(script="ddp", nodes=2, nproc_per_node=4, args=()):
    return trainjob(hand_over(script, nodes=nodes, nproc_per_node=nproc_per_node, args=args))


def skypilot(script="ddp", nodes=2, nproc_per_node=4, args=()):
    job = hand_over(script, nodes=nodes, nproc_per_node=nproc_per_node, args=args)
    return sky_task(job, gpu="A100", bucket="labkit-runs")


@given(some.text())
def test_any_text_is_read_back_as_it_was_written(text):
    assert yaml.safe_load(f"key: {scalar(text)}\n") == {"key": text}
    assert yaml.safe_load(f"a:\n  key: {block(text, 4)}\n  other: 1\n") == {"a": {"key": text, "other": 1}}


@given(some.lists(some.text("ab \t\n#:-", max_size=8), max_size=6))
def test_lines_of_blanks_and_marks_are_read_back(lines):
    text = "\n".join(lines) + "\n"

    assert yaml.safe_load(f"key: {block(text, 2)}\n") == {"key": text}


def test_a_script_is_shown_line_by_line():
    assert "\n    import torch\n" in kubeflow()
    assert "\n  import torch\n" in skypilot()


def test_kubeflow_knows_every_field_of_the_three_objects():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = (models.IoK8sApiCoreV1ConfigMap, models.IoK8sApiCoreV1PersistentVolumeClaim,
             models.TrainerV1alpha1TrainJob)  # fmt: skip

    found = documents(kubeflow(args=["--steps", "100"]))

    assert [kind.from_dict(each).to_dict() for kind, each in zip(kinds, found, strict=True)] == found


def test_a_field_that_kubeflow_does_not_know_would_be_seen():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    wrong = documents(kubeflow())[2]
    patch = wrong["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    patch["template"]["spec"]["template"]["spec"]["volume"] = []

    assert models.TrainerV1alpha1TrainJob.from_dict(wrong).to_dict() != wrong


def test_kubeflow_runs_torchrun_on_the_script_that_is_mounted():
    script, claim, job = documents(kubeflow(args=["--steps", "100"]))
    trainer = job["spec"]["trainer"]
    pod = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    volumes = {v["name"]: v for v in pod["template"]["spec"]["template"]["spec"]["volumes"]}

    assert trainer["command"][:4] == ["torchrun", "/labkit/ddp.py", "--steps", "100"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert volumes["script"]["configMap"]["name"] == script["metadata"]["name"]
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert "def main" in script["data"]["ddp.py"]


def test_skypilot_takes_the_task():
    sky = pytest.importorskip("sky", reason="the skypilot package, which is large, is not installed")
    for text in (skypilot(args=["--steps", "100"]), skypilot(nodes=1, nproc_per_node=1)):
        task = sky.Task.from_yaml_config(documents(text)[0])

        assert task.num_nodes in (1, 2)
        with pytest.raises(Exception, match="did you mean"):
            sky.Task.from_yaml_config({**documents(text)[0], "num_node": 2})


@pytest.mark.parametrize("word", ODD)
def test_odd_values_arrive_as_they_are(odd, tmp_path, word):
    command = documents(kubeflow(odd, args=["--name", word]))[2]["spec"]["trainer"]["command"]
    run = documents(skypilot(odd, args=["--name", word]))[0]["run"]
    seen = subprocess.run(
        ["bash"], input="torchrun() { printf '%s\\0' \"$@\"; }\n" + run.replace("exec ", ""), text=True,
        capture_output=True, check=True, cwd=tmp_path, env={"SKYPILOT_NODE_IPS": "h1\nh2", "HOME": "/home/x",
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "PATH": "/bin:/usr/bin"},
    ).stdout.split("\0")  # fmt: skip

    assert "$(" not in command[-1].replace("$$", "")
    assert command[-1].replace("$$", "$") == word
    assert seen[-3:-1] == ["--name", word]
    assert seen[seen.index("--master-addr") + 1] == "h1"
    assert "/home/x/tr-in-it-s-now.py" in seen


def test_a_script_with_odd_text_is_written_as_it_was(odd, tmp_path):
    setup = documents(skypilot(odd))[0]["setup"].replace('pip install "torch>=2.8" numpy', "")
    subprocess.run(["bash", "-eu"], input=setup, text=True, check=True, env={"HOME": str(tmp_path)})

    assert (tmp_path / "tr-in-it-s-now.py").read_text() == odd.read_text()
    assert documents(kubeflow(odd))[0]["data"]["tr-in-it-s-now.py"] == odd.read_text()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(odd):
    task = documents(skypilot(odd, args=["--name", "a b"]))[0]
    for part in ("setup", "run"):
        subprocess.run(["shellcheck", "-s", "bash", "-"], input=task[part], text=True, check=True)


def test_it_saves_where_both_mount_what_lasts():
    for text in (kubeflow(args=["--save-every", "10"]), skypilot(args=["--save-every", "10"])):
        assert f"--checkpoint-dir {CHECKPOINTS}" in text.replace("\n      - /", " /")
        assert "It saves every 10 steps and on SIGTERM." in text
    assert "so give --save-every" in kubeflow()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export ddp --to skypilot --nodes 2 --nproc-per-node 4", "by their GPU"),
        ("export ddp --to kubeflow --nodes 2 --nproc-per-node 4 --gpu A100", "are SkyPilot's"),
        ("export ddp --to kubeflow --nodes 0 --nproc-per-node 4", "nodes must be at least 1, got 0"),
        ("export ddp --to kubeflow --nodes 2 --nproc-per-node 3", "does not split into 6 ranks"),
        ("export ddp --to kubeflow --nodes 2 --nproc-per-node 4 -- --checkpoint-dir /x", "leave --checkpoint-dir out"),
        ("export ddp --to kubeflow --nodes 2 --nproc-per-node 4 -- --stepps 3", "did you mean 'steps'"),
        ("export ddp --to skypilot --gpu L4 --bucket Mine --nodes 1 --nproc-per-node 1", "small letters"),
    ],
)
def test_what_the_service_would_refuse_is_refused_first(capsys, line, words):
    assert main(line.split()) == 2
    assert words in capsys.readouterr().err


def test_a_script_that_needs_a_file_beside_it_is_refused(tmp_path):
    (tmp_path / "model.py").write_text("")
    (tmp_path / "train.py").write_text("import model\n")

    with pytest.raises(LabError, match="imports model from .*only one file is handed over"):
        hand_over(tmp_path / "train.py", nodes=1, nproc_per_node=1, args=[])


def test_a_script_larger_than_a_config_map_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("# " + "x" * 1_100_000)

    with pytest.raises(LabError, match="a ConfigMap holds 1,000,000"):
        kubeflow(tmp_path / "train.py")


def test_the_terminal_prints_a_file(capsys):
    assert (
        main(
            [
                "export",
                "fsdp",
                "--to",
                "skypilot",
                "--gpu",
                "L4",
                "--nodes",
                "2",
                "--nproc-per-node",
                "2",
                "--",
                "--steps",
                "5",
            ]
        )
        == 0
    )

    task = documents(capsys.readouterr().out)[0]
    assert task["resources"]["accelerators"] == "L4:2"
    assert task["file_mounts"][CHECKPOINTS]["name"].startswith("labkit-fsdp-")

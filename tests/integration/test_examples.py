"""The files in docs/examples: the services' own schemas take them, and what they run is run here as they would."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from strategies.matrix import script

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.fixture
def nodes(tmp_path):
    """`train(argv, environment of each of two nodes)`: their exit codes and all they printed."""
    script("ddp", "transformer", "checkpoints").write(tmp_path / "train.py")
    started = []

    def train(argv, environments):
        for more in environments:
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}
            started.append(
                subprocess.Popen(
                    argv,
                    env=env,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        printed = [process.communicate(timeout=240)[0] for process in started]
        return [process.returncode for process in started], "\n".join(printed)

    yield train
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_kubeflow_knows_every_field_and_would_not_keep_another():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    claim, job = documents("kubeflow.yaml")

    assert models.IoK8sApiCoreV1PersistentVolumeClaim.from_dict(claim).to_dict() == claim
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["nodes"] = 2
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_skypilot_takes_the_task_and_names_a_field_that_it_does_not_know(monkeypatch):
    sky = pytest.importorskip("sky", reason="the skypilot package, which is large, is not installed")
    monkeypatch.chdir(EXAMPLES)
    (task,) = documents("skypilot.yaml")

    assert sky.Task.from_yaml_config(task).num_nodes == 2
    with pytest.raises(Exception, match="did you mean"):
        sky.Task.from_yaml_config({**task, "num_node": 2})


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_has_nothing_to_say(part):
    subprocess.run(["shellcheck", "-s", "bash", "-"], input=documents("skypilot.yaml")[0][part], text=True, check=True)


def test_the_command_of_the_trainjob_trains_on_two_nodes(nodes, port, tmp_path):
    """With what Kubeflow's plugin for torch sets, PET_*, and a command that names only the script."""
    trainer = documents("kubeflow.yaml")[1]["spec"]["trainer"]
    places = {"/script/train.py": str(tmp_path / "train.py"), "/checkpoints": str(tmp_path / "checkpoints"), "100": "4"}
    command = [places.get(word, word) for word in trainer["command"]]
    pod = {each["name"]: each["value"] for each in trainer["env"]}
    pod |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}

    codes, printed = nodes([*command, "--steps", "4"], [{**pod, "PET_NODE_RANK": str(k)} for k in range(2)])

    assert codes == [0, 0], printed
    assert (tmp_path / "checkpoints" / "step-4").is_dir()


def test_the_run_of_the_sky_task_trains_on_two_nodes(nodes, port, tmp_path):
    """With the environment that SkyPilot's documentation names."""
    (task,) = documents("skypilot.yaml")
    run = task["run"].replace("29500", port).replace("--nproc-per-node 4", "--nproc-per-node 1")
    run = run.replace("/checkpoints", str(tmp_path / "checkpoints")).replace(
        "--save-every 100", "--save-every 4 --steps 4"
    )
    sky = {**task["envs"], "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}

    codes, printed = nodes(["bash", "-c", run], [{**sky, "SKYPILOT_NODE_RANK": str(k)} for k in range(2)])

    assert codes == [0, 0], printed
    assert (tmp_path / "checkpoints" / "step-4").is_dir()

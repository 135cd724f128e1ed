"""What is handed over is run here as the services would: their environment, one torchrun per node."""

import os
import signal
import socket
import subprocess
import time

import pytest
import yaml

from labkit.cluster.handover import hand_over
from labkit.cluster.kubeflow import trainjob
from labkit.cluster.skypilot import sky_task

STEPS = ["--steps", "40", "--global-batch-size", "4"]


@pytest.fixture
def nodes(tmp_path):
    """`start(argv, environment of each of two nodes)`; whatever is left of them afterwards is ended."""
    started = []

    def start(argv, environments):
        for more in environments:
            env = {**os.environ, "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}
            started.append(
                subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 text=True, start_new_session=True)
            )  # fmt: skip
        return started[-2:]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def ended(processes):
    said = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], "\n".join(said)


def test_a_trainjob_trains_and_goes_on_after_sigterm(nodes, port, tmp_path):
    """With what Kubeflow's torch runtime sets (its plugin for torch): PET_*, a command that says only the script."""
    script, _, job = yaml.safe_load_all(
        trainjob(hand_over("ddp", nodes=2, nproc_per_node=1, args=["--steps", "4000", "--global-batch-size", "4"]))
    )
    (tmp_path / "ddp.py").write_text(script["data"]["ddp.py"])
    places = {"/labkit/ddp.py": str(tmp_path / "ddp.py"), "/checkpoints": str(tmp_path / "checkpoints")}
    trainer = job["spec"]["trainer"]
    command = [places.get(word, word) for word in trainer["command"]]
    pod = {each["name"]: each["value"] for each in trainer["env"]}
    pod |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}

    first = nodes(command, [{**pod, "PET_NODE_RANK": str(k)} for k in range(2)])
    deadline = time.monotonic() + 90
    while not (line := first[0].stdout.readline()).startswith("step 20 ") and line and time.monotonic() < deadline:
        pass
    for process in first:
        process.terminate()  # as Kubernetes ends a pod
    _, said = ended(first)
    assert "stopped by SIGTERM after step" in said
    saved = [int(path.name.partition("-")[2]) for path in (tmp_path / "checkpoints").glob("step-*")]

    command[command.index("4000")] = str(max(saved) + 5)
    codes, said = ended(nodes(command, [{**pod, "PET_NODE_RANK": str(k)} for k in range(2)]))
    assert codes == [0, 0]
    assert f"\nstep {max(saved) + 1} " in said
    assert "\nstep 1 " not in said


def test_a_sky_task_trains_on_both_nodes(nodes, port, tmp_path):
    """With the environment that SkyPilot's documentation names, and the setup and run it would give to bash."""
    task = yaml.safe_load(
        sky_task(hand_over("ddp", nodes=2, nproc_per_node=1, args=STEPS), gpu="L4", bucket="labkit-runs")
    )
    setup = task["setup"].replace('pip install "torch>=2.8" numpy', "")
    subprocess.run(["bash", "-eu"], input=setup, text=True, check=True, env={"HOME": str(tmp_path)})
    run = task["run"].replace("29500", port).replace("/checkpoints", str(tmp_path / "checkpoints"))
    sky = {**task["envs"], "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}

    codes, said = ended(nodes(["bash", "-c", run], [{**sky, "SKYPILOT_NODE_RANK": str(k)} for k in range(2)]))

    assert codes == [0, 0]
    assert "step 40" in said
    assert (tmp_path / "checkpoints" / "step-40").is_dir()

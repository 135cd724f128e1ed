import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.launcher.multinode import create, torchrun_of_node
from labkit.launcher.torchrun import (
    NCCL_DUMPS,
    marked,
    rank_environment,
    recorded_environment,
    reproducing_command,
    script_folder,
    torchrun_command,
)
from labkit.record import Nodes
from labkit.record.folder import MARKER
from labkit.write.launch_options import LaunchOptions

LEFTOVERS = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "8",
    "PET_RDZV_ENDPOINT": "x:1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/x",
}
SECRETS = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "WANDB_API_KEY",
    "KAGGLE_KEY",
    "DATABASE_URL",
    "SSH_AUTH_SOCK",
    "NCCL_SECRET_TOKEN",
    "TORCH_HUB_TOKEN",
    "PYTORCH_api_key",
    "LABKIT_PASSWORD",
    "LABKIT_Secret",
    "CUDA_LICENSE_KEY",
    "OMP_Token",
]

texts = st.text(st.characters(exclude_characters="\0"), max_size=20)


@pytest.fixture
def environment_of(folder):
    def make(base=None, *, nproc_per_node=2, cores=8, extra=None):
        return rank_environment(
            base or {}, folder, nproc_per_node=nproc_per_node, cores=cores, script_dir="/scripts", extra=extra
        )

    return make


def test_the_command_is_this_interpreters_torchrun_round_the_worker(folder):
    assert torchrun_command(folder, 4, "/my scripts/train.py", ["50", "--name", "a b"]) == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        "--nproc-per-node",
        "4",
        "--max-restarts",
        "0",
        "--redirects",
        "3",
        "--log-dir",
        str(folder.torchrun_logs),
        "-m",
        "--",
        "labkit.worker",
        "/my scripts/train.py",
        "50",
        "--name",
        "a b",
    ]


def test_the_scripts_arguments_come_last_whatever_they_look_like(folder):
    arguments = ["--nproc-per-node", "9", "-m", "--", ""]

    assert torchrun_command(folder, 2, "train.py", arguments)[-6:] == ["train.py", *arguments]


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("train.py", [], "torchrun --standalone --nproc-per-node=2 -- train.py"),
        ("train.py", ["--steps", "3"], "torchrun --standalone --nproc-per-node=2 -- train.py --steps 3"),
        ("my train.py", ["it's"], """torchrun --standalone --nproc-per-node=2 -- 'my train.py' 'it'"'"'s'"""),
        ("train.py", ["$(reboot)", ""], "torchrun --standalone --nproc-per-node=2 -- train.py '$(reboot)' ''"),
    ],
)
def test_the_reproducing_command_is_quoted_for_a_shell(script, arguments, line):
    assert reproducing_command(script, 2, arguments, {}) == line


@given(texts, st.lists(texts), texts)
def test_a_shell_reads_the_reproducing_command_as_it_was_given(script, arguments, library):
    words = shlex.split(reproducing_command(script, 2, arguments, {"PYTHONPATH": library}))

    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", "--"]
    assert words == [f"PYTHONPATH={library}", *torchrun, script, *arguments]


def test_the_reproducing_command_names_what_the_ranks_were_given_but_no_secret_and_nothing_for_labkit():
    given = {
        "OMP_NUM_THREADS": "4",
        "LABKIT_REACHABLE": "0",
        "HF_TOKEN": "s3cret",
        "NCCL_SECRET_TOKEN": "s3cret",
        "HOME": "/home/me",
    }

    assert reproducing_command("train.py", 2, [], given) == (
        "HF_TOKEN=… HOME=… NCCL_SECRET_TOKEN=… OMP_NUM_THREADS=4 torchrun --standalone --nproc-per-node=2 -- train.py"
    )


@pytest.mark.parametrize("name", LEFTOVERS)
def test_each_leftover_of_another_launch_is_dropped_and_named(environment_of, name):
    environment, dropped = environment_of({name: LEFTOVERS[name], "HOME": "/home/me"})

    assert dropped == [name]
    assert name not in environment
    assert environment["HOME"] == "/home/me"


def test_leftovers_are_named_in_order(environment_of):
    assert environment_of(LEFTOVERS)[1] == sorted(LEFTOVERS)


@pytest.mark.parametrize("name", ["RANKING", "MY_RANK", "MASTER", "PETS", "WORLD_SIZES", "TORCH_HOME"])
def test_what_only_looks_like_a_leftover_stays(environment_of, name):
    environment, dropped = environment_of({name: "kept"})

    assert (environment[name], dropped) == ("kept", [])


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (7, 2, "3"), (2, 4, "1"), (1, 1, "1")])
def test_threads_are_the_cores_over_the_ranks(environment_of, cores, ranks, threads):
    environment, _ = environment_of(nproc_per_node=ranks, cores=cores)

    assert environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE"])
def test_what_the_user_has_set_is_kept_over_our_defaults(environment_of, name):
    environment, _ = environment_of({name: "theirs"})

    assert environment[name] == "theirs"


def test_what_the_user_passes_wins_over_what_is_set(environment_of):
    environment, _ = environment_of({"OMP_NUM_THREADS": "1", "X": "1"}, extra={"OMP_NUM_THREADS": "9", "X": "2"})

    assert (environment["OMP_NUM_THREADS"], environment["X"]) == ("9", "2")


def test_what_the_run_needs_wins_over_everything(environment_of, folder):
    ours = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    ours |= {"LABKIT_RUN_DIR": str(folder.path), "LABKIT_SCRIPT_DIR": "/scripts"}
    theirs = dict.fromkeys(ours, "theirs")

    environment, _ = environment_of(theirs, extra=theirs)

    assert {name: environment[name] for name in ours} == ours


def test_the_callers_environment_is_left_as_it_was(environment_of):
    base = dict(LEFTOVERS)
    environment_of(base)

    assert base == LEFTOVERS


def test_the_supervisor_carries_no_marker_and_its_processes_do(environment_of, folder):
    environment, _ = environment_of({MARKER: "an older run"})

    assert MARKER not in environment
    second = folder.attempt(2)
    told = {MARKER: folder.id, "LABKIT_RUN_DIR": str(folder.path / "attempts" / "2"), "LABKIT_ATTEMPT": "2"}
    told |= dict.fromkeys(NCCL_DUMPS, f"{second.ranks}/fr_") | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    told["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "2500"
    assert marked(environment, folder, second, 2) == environment | told
    assert marked({NCCL_DUMPS[0]: "/theirs"}, folder, second, 2)[NCCL_DUMPS[0]] == "/theirs"


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_never_recorded(name):
    assert recorded_environment({name: "s3cret", "PATH": "/bin"}) == {}


@pytest.mark.parametrize("name", ["LABKIT_DB_PASSWD", "LABKIT_DB_PWD", "NCCL_CREDENTIALS", "TORCH_HUB_AUTH"])
def test_a_secret_by_another_word_is_never_recorded(name):
    assert recorded_environment({name: "s3cret"}) == {}


def test_what_explains_a_run_is_recorded_in_order_of_name():
    wanted = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "PYTHONPATH": "/lib"}
    others = {"HOME": "/home/me", "USER": "me", "EDITOR": "vi"}

    recorded = recorded_environment(dict(reversed((wanted | others).items())))

    assert recorded == wanted
    assert list(recorded) == sorted(wanted)


def test_modules_beside_a_script_are_looked_for_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert script_folder("sub/train.py") == str(tmp_path / "sub")
    assert script_folder(None) == str(tmp_path)


def test_torchruns_own_parser_reads_every_command_as_meant(tmp_path):
    from torch.distributed.run import parse_args

    script = tmp_path / "train.py"
    script.write_text("import sys\n")
    shadowed = ["--log", "x", "--node=1", "--", "--nnodes", "9"]  # by --log-dir, --node-rank, --nnodes
    folder = create(script, Nodes(2, 3), LaunchOptions(args=shadowed), {}, port=29500)
    plain = folder.command.read_text().splitlines()[1]
    worker = "labkit.worker"
    commands = {
        "launch": (torchrun_command(folder, 3, str(script), shadowed)[3:], worker),
        "a node": (torchrun_of_node(folder, 1, "localhost", 29500)[3:], worker),
        "without labkit": (shlex.split(reproducing_command(str(script), 3, shadowed, {}))[1:], str(script)),
        "a node without labkit": (shlex.split(plain)[1:], str(script)),
    }

    for name, (command, program) in commands.items():
        read = parse_args(command)
        assert (read.training_script, read.module) == (program, program == worker), name
        assert read.training_script_args == [str(script)] * read.module + shadowed, name
        assert (read.nproc_per_node, read.max_restarts) == ("3", 0), name

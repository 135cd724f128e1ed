import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.launch_options import LaunchOptions
from labkit.launcher.prepare import create_run, prepare_launch
from labkit.launcher.torchrun_command import (
    NCCL_DUMPS,
    marked,
    node_command,
    rank_environment,
    recorded_environment,
    reproducing_command,
    torchrun_command,
)
from labkit.rank_files import FOLDER, GUEST, HIDDEN, MARKER
from labkit.record import Nodes

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


def test_the_command_is_this_interpreters_torchrun_with_the_guest(folder):
    assert torchrun_command(folder, 4, ["/my scripts/train.py"], ["50", "--name", "a b"]) == [
        sys.executable,
        "-P",
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
        "--",
        str(folder.guest),
        "/my scripts/train.py",
        "50",
        "--name",
        "a b",
    ]


def test_the_scripts_arguments_come_last_whatever_they_look_like(folder):
    arguments = ["--nproc-per-node", "9", "-m", "--", ""]

    assert torchrun_command(folder, 2, ["train.py"], arguments)[-6:] == ["train.py", *arguments]


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
    assert reproducing_command([script], 2, arguments, {}) == line


def test_a_module_is_reproduced_with_torchruns_own_option():
    line = reproducing_command(["-m", "pkg.train"], 2, ["--log", "x"], {})

    assert line == "torchrun --standalone --nproc-per-node=2 -m -- pkg.train --log x"


@given(texts, st.lists(texts), texts)
def test_a_shell_reads_the_reproducing_command_as_it_was_given(script, arguments, library):
    words = shlex.split(reproducing_command([script], 2, arguments, {"PYTHONPATH": library}))

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

    assert reproducing_command(["train.py"], 2, [], given) == (
        "HF_TOKEN=… HOME=… NCCL_SECRET_TOKEN=… OMP_NUM_THREADS=4 torchrun --standalone --nproc-per-node=2 -- train.py"
    )


@pytest.mark.parametrize("name", LEFTOVERS)
def test_each_leftover_of_another_launch_is_dropped_and_named(name):
    environment, dropped = rank_environment({name: LEFTOVERS[name], "HOME": "/home/me"})

    assert dropped == [name]
    assert name not in environment
    assert environment["HOME"] == "/home/me"


def test_leftovers_are_named_in_order():
    assert rank_environment(LEFTOVERS)[1] == sorted(LEFTOVERS)


@pytest.mark.parametrize("name", ["RANKING", "MY_RANK", "MASTER", "PETS", "WORLD_SIZES", "TORCH_HOME"])
def test_what_only_looks_like_a_leftover_stays(name):
    environment, dropped = rank_environment({name: "kept"})

    assert (environment[name], dropped) == ("kept", [])


def test_threads_are_left_to_torchrun():
    assert "OMP_NUM_THREADS" not in rank_environment({})[0]
    assert rank_environment({"OMP_NUM_THREADS": "3"})[0]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE"])
def test_what_the_user_has_set_is_kept_over_our_defaults(name):
    environment, _ = rank_environment({name: "theirs"})

    assert environment[name] == "theirs"


def test_what_the_user_passes_wins_over_what_is_set():
    environment, _ = rank_environment({"OMP_NUM_THREADS": "1", "X": "1"}, extra={"OMP_NUM_THREADS": "9", "X": "2"})

    assert (environment["OMP_NUM_THREADS"], environment["X"]) == ("9", "2")


def test_the_callers_environment_is_left_as_it_was():
    base = dict(LEFTOVERS)
    rank_environment(base)

    assert base == LEFTOVERS


def test_the_supervisor_carries_no_marker_and_its_processes_do(folder):
    environment, _ = rank_environment({MARKER: "an older run"})

    assert MARKER not in environment
    second = folder.attempt(2)
    told = {MARKER: folder.id, FOLDER: str(folder.path / "attempts" / "2")}
    told |= dict.fromkeys(NCCL_DUMPS, f"{second.ranks}/fr_") | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    told["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "2500"
    told |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "180", HIDDEN: "LABKIT_HOST,TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert marked(environment, folder, second, []) == environment | told
    assert marked({NCCL_DUMPS[0]: "/theirs"}, folder, second, [])[NCCL_DUMPS[0]] == "/theirs"
    assert marked({FOLDER: "theirs", MARKER: "theirs"}, folder, second, [])[MARKER] == folder.id


def test_the_time_that_a_user_gives_torchrun_is_kept_and_seen_by_the_script(folder):
    chosen = marked({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, folder, folder, [])

    assert (chosen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], chosen[HIDDEN]) == ("7", "LABKIT_HOST")
    assert all(name.startswith(GUEST) for name in chosen if name in (FOLDER, HIDDEN))


@pytest.mark.parametrize(
    ("words", "quick"),
    [
        (["--standalone"], True),
        (["--master-addr", "127.0.0.1"], True),  # of one node, or where ssh has shown an address
        (["--master-addr", "fd00::1"], True),
        (["--master-addr", "node-7"], False),  # the name must be resolved, however long that takes
        ([], False),
    ],
)
def test_torchrun_waits_long_for_a_name_server_only_where_it_needs_a_name(folder, words, quick):
    environment = marked({}, folder, folder, ["torchrun", *words])

    assert ("RES_OPTIONS" in environment) is quick
    assert ("RES_OPTIONS" in environment[HIDDEN]) is quick  # the script does not see it
    theirs = marked({"RES_OPTIONS": "timeout:9"}, folder, folder, ["torchrun", *words])
    assert theirs["RES_OPTIONS"] == "timeout:9"
    assert "RES_OPTIONS" not in theirs[HIDDEN]


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


def test_torchruns_own_parser_reads_every_command_as_meant(tmp_path):
    from torch.distributed.run import parse_args

    script = tmp_path / "train.py"
    script.write_text("import sys\n")
    shadowed = ["--log", "x", "--node=1", "--", "--nnodes", "9"]  # by --log-dir, --node-rank, --nnodes
    folder = create_run(prepare_launch(script, LaunchOptions(args=shadowed), {}, nodes=Nodes(2, 3)), port=29500)
    plain = folder.command.read_text().splitlines()[1]
    in_node = node_command(folder, 1, "localhost", 29500)
    guest = str(folder.guest)
    without = reproducing_command(["-m", "pkg.train"], 3, shadowed, {})
    commands = {
        "launch": (torchrun_command(folder, 3, [str(script)], shadowed)[4:], guest, [str(script)]),
        "a module": (torchrun_command(folder, 3, ["-m", "pkg.train"], shadowed)[4:], guest, ["-m", "pkg.train"]),
        "a node": (in_node[in_node.index("--") + 5 :], guest, [str(script)]),
        "without labkit": (shlex.split(reproducing_command([str(script)], 3, shadowed, {}))[1:], str(script), []),
        "a module without labkit": (shlex.split(without)[1:], "pkg.train", []),
        "a node without labkit": (shlex.split(plain)[1:], str(script), []),
    }

    for name, (command, program, words) in commands.items():
        read = parse_args(command)
        assert (read.training_script, read.module) == (program, name == "a module without labkit"), name
        assert read.training_script_args == words + shadowed, name
        assert (read.nproc_per_node, read.max_restarts) == ("3", 0), name

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ScriptError
from labkit.write import Option, Script, check_flags, command_line, options_of

TEXT = """
import argparse

DEFAULT = 3


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("input", nargs="?")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", "--learning-rate", type=float, default=1e-3)
    parser.add_argument("--computed", type=int, default=DEFAULT)
    group = parser.add_argument_group("files")
    group.add_argument("-d", "--data-dir", default="")
    group.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    group.add_argument("--compile", action="store_true")
    group.add_argument("--no-shuffle", action="store_false")
    group.add_argument("--bucket-view", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--tags", nargs="+")
    return parser
"""
NAMES = ["steps", "lr", "learning_rate", "computed", "data_dir", "precision", "compile"]
NAMES += ["no_shuffle", "bucket_view", "tags"]
SCRIPT = Script.parse(TEXT, name="train")


@pytest.fixture(scope="module")
def parse():
    names = {}
    exec(TEXT, names)
    return names["make_parser"]().parse_args


def test_an_option_with_an_action_of_its_own_and_no_value_is_a_flag():
    assert options_of(Script.load("fsdp", "deterministic"))["deterministic"] == Option(
        "--deterministic", "flag", default=False
    )


def test_options_are_the_long_flags_in_the_order_they_are_declared():
    assert list(options_of(SCRIPT)) == NAMES


@pytest.mark.parametrize(
    "option",
    [
        Option("--steps", "int", default=10),
        Option("--lr", "float", default=1e-3),
        Option("--computed", "int", default=None),
        Option("--data-dir", "str", default=""),
        Option("--precision", "str", ("fp32", "bf16"), "fp32"),
        Option("--compile", "flag", default=False),
        Option("--no-shuffle", "flag", default=True),
        Option("--bucket-view", "flag", default=True, negatable=True),
    ],
    ids=lambda option: option.name,
)
def test_an_option_knows_its_kind_its_choices_and_its_default(option):
    assert options_of(SCRIPT)[option.name[2:].replace("-", "_")] == option


@pytest.mark.parametrize(
    ("parameters", "argv"),
    [
        ({}, []),
        ({"steps": 200, "precision": "bf16"}, ["--steps", "200", "--precision", "bf16"]),
        ({"precision": "bf16", "steps": 200}, ["--precision", "bf16", "--steps", "200"]),
        ({"steps": "200"}, ["--steps", "200"]),
        ({"lr": 1e-4}, ["--lr", "0.0001"]),
        ({"lr": 1}, ["--lr", "1"]),
        ({"learning_rate": 0.5}, ["--learning-rate", "0.5"]),
        ({"data_dir": '/my data/it\'s "here"'}, ["--data-dir", '/my data/it\'s "here"']),
        ({"data_dir": ""}, ["--data-dir", ""]),
        ({"compile": True}, ["--compile"]),
        ({"compile": False}, []),
        ({"no_shuffle": True}, ["--no-shuffle"]),
        ({"bucket_view": True}, ["--bucket-view"]),
        ({"bucket_view": False}, ["--no-bucket-view"]),
        ({"steps": None, "compile": None, "precision": None}, []),
    ],
)
def test_parameters_become_a_command_line(parameters, argv, parse):
    assert command_line(SCRIPT, parameters) == argv
    parse(argv)


@given(
    steps=st.integers(-(10**30), 10**30),
    lr=st.floats(0, allow_infinity=False),
    data_dir=st.text().filter(lambda text: not text.startswith("-")),
    precision=st.sampled_from(["fp32", "bf16"]),
    compile=st.booleans(),
    bucket_view=st.booleans(),
)
def test_the_script_reads_the_values_that_were_given(parse, **parameters):
    read = vars(parse(command_line(SCRIPT, parameters)))

    assert {name: read[name] for name in parameters} == parameters


@pytest.mark.parametrize("parameters", [{"data_dir": "-rf"}, {"data_dir": "--steps"}, {"lr": -1e-5}])
def test_a_value_that_begins_with_a_dash_reaches_the_script(parse, parameters):
    try:
        read = vars(parse(command_line(SCRIPT, parameters)))
    except SystemExit:
        pytest.fail("argparse refused the command line")

    assert {name: read[name] for name in parameters} == parameters


def test_a_list_reaches_the_script_as_its_items(parse):
    assert parse(command_line(SCRIPT, {"tags": ["a", "b c"]})).tags == ["a", "b c"]


def test_an_unknown_parameter_is_answered_with_the_nearest_and_all():
    with pytest.raises(ScriptError) as caught:
        command_line(SCRIPT, {"stpes": 3})

    assert str(caught.value) == (
        f"train.py takes no parameter 'stpes'; did you mean 'steps'? It takes: {', '.join(NAMES)}"
    )


def test_the_number_of_ranks_under_another_name_is_answered_with_launchs():
    with pytest.raises(ScriptError, match="'gpus'; the number of ranks on a machine is nproc_per_node"):
        command_line(SCRIPT, {"gpus": 2})


def test_an_unknown_parameter_like_no_other_is_answered_with_all():
    with pytest.raises(ScriptError) as caught:
        command_line(SCRIPT, {"zzz": 3})

    assert str(caught.value) == f"train.py takes no parameter 'zzz'. It takes: {', '.join(NAMES)}"


def test_a_script_without_options_says_how_to_pass_arguments():
    with pytest.raises(ScriptError, match=r"train\.py declares no options.*args=\[…\]"):
        command_line(Script.parse("print(1)\n", name="train"), {"steps": 3})


def test_a_positional_argument_is_no_parameter():
    with pytest.raises(ScriptError, match="takes no parameter 'input'"):
        command_line(SCRIPT, {"input": "x"})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"precision": "fp8"}, "precision of train.py must be one of fp32, bf16; got 'fp8'"),
        ({"precision": True}, "precision of train.py must be one of fp32, bf16; got True"),
        ({"steps": 3.5}, "steps of train.py must be an integer; got 3.5"),
        ({"steps": 3.0}, "steps of train.py must be an integer; got 3.0"),
        ({"steps": "many"}, "steps of train.py must be an integer; got 'many'"),
        ({"steps": True}, "steps of train.py must be an integer; got True"),
        ({"steps": [1, 2]}, "steps of train.py must be an integer; got [1, 2]"),
        ({"lr": "fast"}, "lr of train.py must be a number; got 'fast'"),
        ({"lr": float("nan")}, "lr of train.py must be a number; got nan"),
        ({"lr": float("inf")}, "lr of train.py must be a number; got inf"),
        ({"lr": False}, "lr of train.py must be a number; got False"),
        ({"compile": "yes"}, "compile of train.py is a flag: expected True or False, got 'yes'"),
        ({"bucket_view": 1}, "bucket_view of train.py is a flag: expected True or False, got 1"),
    ],
)
def test_a_value_the_script_would_refuse_is_refused_before(parameters, message):
    with pytest.raises(ScriptError) as caught:
        command_line(SCRIPT, parameters)

    assert str(caught.value) == message


def test_a_whole_number_of_any_size_is_a_whole_number():
    assert command_line(SCRIPT, {"steps": 10**400}) == ["--steps", str(10**400)]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["file", "-x", "--"],
        ["--steps", "3"],
        ["--steps=3"],
        ["--prec", "bf16"],
        ["--no-bucket-view"],
        ["--learning-rate=1"],
        ["--help"],
    ],
)
def test_arguments_that_argparse_would_accept_pass(args):
    check_flags(SCRIPT, args)


@pytest.mark.parametrize("args", [["--stepz", "3"], ["x", "--stepz=3"]])
def test_an_argument_that_argparse_would_refuse_is_refused_before(args):
    with pytest.raises(ScriptError, match=r"takes no parameter 'stepz'; did you mean 'steps'\?"):
        check_flags(SCRIPT, args)


@pytest.mark.parametrize("text", ["print(1)\n", TEXT + "make_parser().parse_known_args()\n"])
def test_a_script_that_may_take_anything_is_given_anything(text):
    check_flags(Script.parse(text), ["--whatever"])


def test_what_follows_two_dashes_is_no_flag():
    check_flags(SCRIPT, ["--", "--whatever"])

"""labkit's own scripts: every strategy with every extra and every task is one sound, self-contained file."""

import argparse
import ast
import importlib.util
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.errors import ScriptError
from labkit.write import Script, is_library, options_of, script_files, script_names, strategy_of
from labkit.write.compose import flags, library
from labkit.write.lines import EACH, LINE
from unit.composed import combinations, together

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts"
TASKS = sorted(library().tasks)
# What a newcomer reads from top to bottom: not the sizes of the day.
MOST_LINES = dict.fromkeys(("single", "ddp", "zero1", "zero2", "fsdp"), 325)
MOST_LINES |= {"tensor_parallel": 400, "fsdp1": 400, "diloco": 425, "expert_parallel": 450}
MOST_LINES |= {"pipeline": 560, "hybrid": 560, "context_parallel": 560}
MOST_CHANGED = {("ddp", "single"): 12, ("fsdp", "ddp"): 15}
MOST_IN_ALL = 4195
GOLF = re.compile(r"globals\(\)|cache\(lambda|\(\w+ := .*\)\[")

each_strategy = pytest.mark.parametrize("strategy", script_names())


def loaded(script, tmp_path, monkeypatch):
    """The script as a module, with no arguments."""
    path = script.write(tmp_path / f"{script.name}_{script.sha256[:8]}.py")
    monkeypatch.setattr(sys, "argv", [path.name])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_train_the_strategies_the_extras_and_the_tasks():
    parts = {"strategies": library().strategies, "extras": library().extras, "tasks": library().tasks}
    expected = {f"{folder}/{name}.py" for folder, names in parts.items() for name in names}

    assert {"train.py"} <= set(script_files()) <= {"train.py"} | expected
    assert expected - set(script_files()) <= {"strategies/single.py", "tasks/bytes.py"}
    assert script_names()[0] == "single"
    assert {"ddp", "fsdp", "zero1", "zero2", "fsdp1", "tensor_parallel", "pipeline", "hybrid"} <= set(script_names())


def test_single_is_train_py_without_its_lines_for_other_cells():
    lines = (FOLDER / "train.py").read_text(encoding="utf-8").split("\n")
    for_others = [line for line in lines if LINE.fullmatch(line) or line.startswith("# A comment ")]

    assert len(for_others) > 20
    assert str(Script.load("single")) == "\n".join(line for line in lines if line not in for_others)


@pytest.mark.parametrize("name", script_files())
def test_a_line_for_other_cells_names_a_cell_a_function_or_an_option_that_there_is(name):
    cells = [cell for part in library().parts for cell in part.cells]
    known = {name for cell in cells for name in (cell.title, *cell.defines, *flags(cell.text))} | {EACH}
    lines = map(LINE.fullmatch, script_files()[name].read_text(encoding="utf-8").split("\n"))

    assert {name for line in lines if line for name in line["names"].split(" or ")} <= known


@pytest.mark.parametrize("name", script_files())
def test_nothing_is_looked_up_by_reflection(name):
    assert not GOLF.search(script_files()[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("task", TASKS)
@each_strategy
def test_every_combination_is_a_sound_script(strategy, task):
    tried = combinations(strategy, task)
    assert {extra for extras in tried for extra in extras} >= {"checkpoints", "precision"}
    for extras in tried:
        script = Script.load(strategy, *extras, task=task)
        declared = re.findall(r'add_argument\(\s*"(--[\w-]+)"', str(script))

        script.check()
        assert len(declared) == len(set(declared)), extras
        assert len(options_of(script)) >= len(declared)
        assert Script.parse(str(script)) == script
        assert is_library(script)
        assert (script.name, strategy_of(script)) == (strategy, strategy)
        titles = [cell.title for cell in script.parts]
        assert len(titles) == len(set(titles))
        assert titles[-1] == "main"
        assert not any(map(LINE.fullmatch, str(script).split("\n")))
        assert not any("blocks_of" in cell.uses for cell in script.parts) or "blocks" in titles


@each_strategy
def test_an_extra_that_goes_with_no_other_strategy_is_refused_there_in_one_sentence(strategy):
    for name, extra in library().extras.items():
        if extra.goes_with and strategy not in extra.goes_with:
            with pytest.raises(ScriptError, match=rf"the extra {name} works with .*, not with {strategy}$"):
                Script.load(strategy, name)


@each_strategy
def test_every_cell_can_be_replaced_by_its_own_text(strategy):
    """So each brings its own imports, defines what the others use, and nothing twice."""
    for task in TASKS:
        script = Script.load(strategy, *(together(strategy) if task == "bytes" else ()), task=task)
        for title, cell in script.cells.items():
            replaced = script.with_cells(**{title: cell.text})

            assert replaced.cells[title].text.strip() == cell.text.strip()
            replaced.check()


@each_strategy
def test_the_cells_only_define(strategy):
    for cell in Script.load(strategy, *together(strategy)).parts:
        cell.check_only_defines()


@pytest.mark.parametrize("name", [name for name in script_files() if not name.startswith("tasks/")])
def test_a_part_imports_only_torch_and_the_standard_library_or_the_library_that_it_is_for(name):
    own = {
        "extras/lora.py": {"peft"},
        "extras/export.py": {"safetensors"},
        "extras/four_bit.py": {"bitsandbytes", "transformers"},
        "extras/optimizers.py": {"torchao"},
        "extras/schedule_free.py": {"schedulefree"},
    }.get(name, set())
    tree = ast.walk(ast.parse(script_files()[name].read_text(encoding="utf-8")))
    names = {
        name.split(".")[0]
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }

    assert names - sys.stdlib_module_names - own <= {"torch"}


@pytest.mark.parametrize("name", script_files())
def test_a_part_says_in_one_sentence_what_it_is_for(name):
    text = script_files()[name].read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""

    assert len(docstring.split("\n")[0]) > 20
    assert not re.search(r"\b(?!train\.py)\w+\.py --", docstring), "the script is called train.py wherever it is run"


@each_strategy
def test_importing_a_script_defines_main_and_does_nothing(strategy, tmp_path, monkeypatch, capfd):
    script = Script.load(strategy, *together(strategy))
    monkeypatch.chdir(tmp_path)

    module = loaded(script, tmp_path, monkeypatch)

    assert callable(module.main)
    assert not module.dist.is_initialized()
    assert [path.suffix for path in tmp_path.iterdir()] == [".py"]
    assert capfd.readouterr() == ("", "")


@each_strategy
def test_a_scripts_options_are_what_its_parser_takes(strategy, tmp_path, monkeypatch):
    for extras in combinations(strategy):
        script = Script.load(strategy, *extras)

        taken = vars(loaded(script, tmp_path, monkeypatch).parse_args())

        options = options_of(script)
        assert options.keys() == taken.keys()
        for name, option in options.items():
            assert taken[name] == option.default or not (taken[name] or option.default), name


def test_meshes_of_ranks_that_share_a_made_up_gpu_communicate_over_gloo(tmp_path, monkeypatch):
    """torch makes a mesh of all ranks a group of its own if there is a GPU and theirs is "gloo": in 2.10 NCCL's."""
    module = loaded(Script.load("pipeline"), tmp_path, monkeypatch)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert module.join_group() == torch.device("cuda", 0)
    try:
        mesh = module.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        assert mesh.get_group() is module.dist.group.WORLD
        with pytest.raises(SystemExit, match="need a GPU each"):
            module.check_schedule(Namespace(schedule="1F1B", accumulate=4), 2)
    finally:
        module.dist.destroy_process_group()


def test_offloaded_shards_stay_in_host_memory_whatever_the_device(tmp_path, monkeypatch):
    """FSDP2 moves each part to the GPU itself, and refuses shards that are there before the first step."""
    module = loaded(Script.load("fsdp", "fsdp_options"), tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["train.py", "--cpu-offload"])
    args = module.parse_args()
    module.dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = module.make_mesh("cpu", args)
        model = module.parallelize(module.Model(), mesh, module.torch.device("meta"), args)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    finally:
        module.dist.destroy_process_group()


@pytest.mark.parametrize("strategy", MOST_LINES)
def test_a_default_script_is_short(strategy):
    assert len(str(Script.load(strategy)).splitlines()) <= MOST_LINES[strategy]


@pytest.mark.parametrize(("after", "before"), MOST_CHANGED)
def test_from_one_strategy_to_the_next_few_lines_change(after, before):
    assert Script.load(after).diff(before).changed <= MOST_CHANGED[after, before]


@each_strategy
def test_layers_are_looked_for_only_where_a_model_does_not_list_them(strategy):
    """As `blocks`, each a new one. A layer that a model uses twice is one block, which only the search knows."""
    listed = "self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))"
    script = Script.load(strategy)
    model = script.cells["model"].text
    assert listed in model
    shared = script.with_cells(
        model=model.replace(listed, "self.blocks = nn.Sequential(*[Block(width, heads)] * layers)")
    )

    assert "blocks_of" not in str(script)
    assert ("blocks" in shared.cells) == ("blocks_of(" in "".join(c.text for c in shared.parts if c.title != "blocks"))
    assert ("blocks" in shared.cells) == (strategy not in ("single", "ddp", "zero1", "diloco"))
    assert shared.with_cells(model=model) == shared.with_cells(model=model).with_cells(model=model)


def test_selective_checkpointing_keeps_attention_by_whichever_kernel():
    cells = {}
    exec(Script.load("single", "recompute_and_compile").cells["layers"].text, cells)
    cells["create_selective_checkpoint_contexts"] = lambda policy: policy
    kernels = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    kept = [cells["selective"]()(None, getattr(torch.ops.aten, name).default) for name in (*kernels, "mm", "gelu")]

    assert [decision.name for decision in kept] == ["MUST_SAVE"] * 4 + ["PREFER_RECOMPUTE"]


def test_all_parts_together_are_short():
    assert sum(len(path.read_text().splitlines()) for path in script_files().values()) <= MOST_IN_ALL


@pytest.mark.parametrize(
    ("schedule", "torch", "refused"),
    [
        (
            "GPipe",
            "2.10.0+cu128",
            "--schedule GPipe on 2 pipeline ranks needs at least 2 micro-batches; --accumulate is 1",
        ),
        ("GPipe", "2.11.0", None),
        ("1F1B", "2.13.0", "--schedule 1F1B on 2 pipeline ranks needs at least 2 micro-batches; --accumulate is 1"),
        ("DualPipeV", "2.12.1", "--schedule DualPipeV needs torch 2.13 or newer; this is 2.12.1"),
    ],
)
@pytest.mark.parametrize("name", ["pipeline", "hybrid"])
def test_a_schedule_that_this_torch_would_not_make_is_refused(name, schedule, torch, refused, tmp_path, monkeypatch):
    """Before 2.11 torch refused a GPipe of fewer micro-batches than stages, with a traceback in every rank."""
    module = loaded(Script.load(name), tmp_path, monkeypatch)
    monkeypatch.setattr(module.torch, "__version__", torch)
    monkeypatch.setattr(module.dist, "get_backend", lambda: "nccl")
    args = argparse.Namespace(schedule=schedule, accumulate=1, compile=False, virtual_stages=2)

    try:
        module.check_schedule(args, 2)
    except SystemExit as error:
        assert str(error) == refused
    else:
        assert refused is None

"""Scripts out of a strategy, extras, a task and one's own cells; options that bring their extras; how it is shown."""

import ast
import html
import importlib.util
import linecache
import re
import sys
from collections import OrderedDict

import pytest

import labkit
from labkit import Script, ScriptError
from labkit.cli import main
from labkit.launch_options import LaunchOptions
from labkit.launcher.prepare import prepare_launch
from labkit.write import (
    command_line,
    completed,
    extra_options,
    is_composed,
    is_library,
    library,
    options_of,
    options_of_strategy,
    script_names,
    strategy_of,
)
from labkit.write.cells import Cell
from labkit.write.lines import with_lines_of


def prepared(script, parameters, args=()):
    return prepare_launch(script, LaunchOptions(nproc_per_node=2, args=args), parameters)


RESNET = """from torch import nn


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x)
"""


@pytest.fixture
def live(tmp_path, monkeypatch):
    """`live(text, name)`: an object of a module of the user's own."""

    def make(text, name):
        path = tmp_path / "my_module.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("my_module", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "my_module", module)
        spec.loader.exec_module(module)
        return getattr(module, name)

    return make


@pytest.fixture
def notebook(tmp_path):
    """`notebook(text)`: the names that a cell of a notebook defines."""
    name = str(tmp_path / "ipykernel_1" / "1.py")

    def run(text):
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        namespace = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), namespace)
        return namespace

    yield run
    linecache.cache.pop(name, None)


def refused(act, *words):
    with pytest.raises(ScriptError) as raised:
        act()
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- composing


def test_extras_bring_cells_and_their_lines_in_others():
    script = Script.load("fsdp", "checkpoints", "precision", task="digits")
    plain = Script.load("fsdp")

    assert script.cells.keys() - plain.cells.keys() == {"checkpoints", "notes", "precision"}
    changed = {title for title, cell in plain.cells.items() if script.cells[title] != cell}
    assert changed == {"parameters", "model", "data", "strategy", "step", "update", "main"}
    lines = {line.strip() for title in changed - {"model", "data"} for line in script.cells[title].text.split("\n")}
    assert lines >= {
        'checkpoints_arguments(parser.add_argument_group("checkpoints"))',
        "model = in_precision(model, device, args)",
        "scaler.scale(loss).backward()",
        "stopped = checkpoints.after_step(step, total_steps, stopped)",
    }
    assert not lines & {"loss.backward()", "optimizer.step()", "fully_shard(module.to(device), mesh=mesh)"}
    assert script.head == plain.head
    assert (script.name, strategy_of(script)) == ("fsdp", "fsdp")


def test_an_extra_that_is_named_twice_is_taken_once():
    assert Script.load("ddp", "precision", "precision") == Script.load("ddp", "precision")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (("ddp", "checkpoint"), ["no extra named 'checkpoint'; did you mean 'checkpoints'? There are: accumulate"]),
        (("ddp", "digits"), ["'digits' is not an extra but a task", "task='digits'"]),
        (("ddp", "fsdp"), ["'fsdp' is not an extra but a strategy"]),
        (("checkpoints",), ["'checkpoints' is not a strategy but an extra", "Script.load('single', 'checkpoints')"]),
        (("fsdp", "ddp_options"), ["the extra ddp_options works with ddp", "not with fsdp"]),
        (
            ("pipeline", "accumulate"),
            [
                "pipeline and accumulate are incompatible: both replace the 'step' cell",
                "pipeline already has --accumulate",
            ],
        ),
        (("mine.py", "accumulate"), ["mine.py is your own file", "single, context_parallel, ddp"]),
    ],
    ids=str,
)
def test_what_cannot_be_composed_is_refused_with_what_can(wanted, words):
    refused(lambda: Script.load(*wanted), *words)


def test_an_unknown_task_is_answered_with_the_nearest():
    refused(lambda: Script.load("ddp", task="digit"), "no task named 'digit'; did you mean 'digits'? There are: bytes")


def test_two_extras_that_replace_the_same_cell_say_so(monkeypatch, tmp_path):
    """With parts of the test's own, for labkit's may all go together one day."""
    base = '"""Trains."""\n\n# %% step\ndef step():\n    pass\n\n\n# %% strategy\ndef make():\n    pass\n\n\n'
    base += "# %% main\ndef main():\n    # with before or --x: before()\n    step(make())\n"
    base += "    # with helper instead: step(helper_arguments)\n"
    other = "def step():\n    return {}\n"
    for path, text in {
        "train.py": base,
        "strategies/ddp.py": '"""With DDP."""\n\n# %% strategy\ndef make():\n    return 1\n',
        "strategies/two.py": '"""With two."""\n\n# %% strategy\n# of ddp.py\n\n# %% step\n' + other.format(0),
        "extras/one.py": '"""One."""\n\n# %% step\n' + other.format(1),
        "extras/two_more.py": '"""More."""\n# goes with: two, ddp\n\n# %% step\n' + other.format(2),
        "extras/new.py": '"""New."""\n\n# %% helper\ndef helper_arguments(parser):\n    pass\n',
        "extras/unused.py": '"""Unused."""\n\n# %% nobody\ndef nobody():\n    pass\n',
        "extras/before.py": '"""Before."""\n\n# %% before\ndef before():\n    pass\n',
        "tasks/words.py": '"""Words."""\n\n# %% words\nWORDS = 3\n',
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr("labkit.write.compose._folder", lambda: tmp_path)

    assert refused(lambda: Script.load("ddp", "one", "two_more")) == (
        "one and two_more are incompatible: both replace the 'step' cell"
    )
    assert refused(lambda: Script.load("two", "one")) == "two and one are incompatible: both replace the 'step' cell"
    assert refused(lambda: Script.load("single", "two_more")) == (
        "the extra two_more works with two and ddp, not with single"
    )
    assert (
        "return 2" in Script.load("two", "two_more").cells["step"].text
    )  # which goes with it, so may replace its cell
    assert Script.load("two").cells["strategy"] == Script.load("ddp").cells["strategy"]
    assert list(Script.load("ddp", "new").cells) == ["step", "strategy", "helper", "main"]
    assert Script.load("ddp", "unused") == Script.load("ddp")  # a cell that nothing uses is left out
    mains = {extra: Script.load("ddp", extra).cells["main"].text for extra in ("one", "before", "new")}
    assert mains["one"] == "def main():\n    step(make())\n"
    assert mains["before"] == "def main():\n    before()\n    step(make())\n"
    assert mains["new"] == "def main():\n    step(helper_arguments)\n"
    both = Script.load("ddp", "before", "new")
    assert is_library(Script.parse(str(both)))
    assert completed(Script.load("ddp", "new"), []) == Script.load("ddp", "new")


# ---- options that bring their extras


def test_an_option_of_an_extra_adds_it():
    script = completed(Script.load("ddp"), ["steps", "save_every", "precision"])

    assert script == Script.load("ddp", "checkpoints", "precision")
    assert command_line(script, {"save_every": 100}) == ["--save-every", "100"]
    assert completed(script, ["save_every", "deadline_seconds"]) is script


def test_flags_among_raw_arguments_add_it_as_well():
    args = ["--steps", "3", "--save-every=100", "--glob", "8", "--", "--clip"]

    assert completed(Script.load("ddp"), args=args) == Script.load("ddp", "checkpoints")
    assert completed(Script.load("ddp"), args=["--no-gradient-as-bucket-view"]) == Script.load("ddp", "ddp_options")
    assert completed(Script.load("ddp"), args=["--no-static-graph"]) == Script.load(
        "ddp"
    )  # which argparse does not take


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor_parallel"])
def test_completing_is_composing(strategy):
    """Also where the strategy has a cell that only the extra uses."""
    script = completed(Script.load(strategy, "checkpoints", task="digits"), ["accumulate"])

    assert script == Script.load(strategy, "checkpoints", "accumulate", task="digits")
    script.check()


def test_an_option_that_a_strategy_has_itself_adds_nothing():
    assert completed(Script.load("pipeline"), ["accumulate"]) == Script.load("pipeline")


def test_cells_of_ones_own_stay_when_an_extra_is_added():
    mine = Script.load("ddp").with_cells(model=RESNET + "\n\nModel = ResNet\n")

    script = completed(mine, ["save_every"])

    assert script.cells["model"] == mine.cells["model"]
    assert script.cells["model"].origin == "text passed to with_cells"
    assert script.cells["checkpoints"] == Script.load("ddp", "checkpoints").cells["checkpoints"]


def test_an_extra_never_replaces_a_cell_of_ones_own():
    text = Script.load("ddp", "checkpoints").cells["checkpoints"].text.replace("save-every", "keep-every")
    mine = Script.load("ddp").with_cells(checkpoints=text + "\nMINE = 1\n")

    refused(
        lambda: completed(mine, ["save_every"]),
        "save_every is an option of the extra checkpoints, which cannot be added",
        "replaces the 'checkpoints' cell, and this script has your own (text passed to with_cells)",
    )


def test_an_option_of_another_strategys_extra_names_the_extra_and_why():
    option = next(iter(options_of(Script.load("ddp", "ddp_options")).keys() - options_of(Script.load("ddp")).keys()))

    refused(
        lambda: completed(Script.load("zero1"), [option]),
        f"{option} is an option of the extra ddp_options, which cannot be added",
        "works with ddp, not with zero1",
    )


def test_an_option_that_nobody_has_names_the_nearest_also_of_an_extra():
    ddp = Script.load("ddp")

    refused(lambda: command_line(ddp, {"save_evry": 1}), "did you mean 'save_every', of the extra checkpoints?")
    refused(lambda: command_line(ddp, {"stpes": 1}), "did you mean 'steps'?")
    refused(lambda: command_line(ddp, {"watchdogs": 1}), "did you mean 'watchdog'?")


@pytest.mark.parametrize("text", ["print(1)\n", "# %% model\nx = 1\n", 'parser.add_argument("--steps")\n'])
def test_a_script_of_another_make_is_never_completed(text):
    script = Script.parse(text)

    assert completed(script, ["save_every"]) is script
    assert extra_options(script) == {}
    assert not is_composed(script)


def test_a_file_of_ones_own_is_left_as_it_is_and_the_extra_named(tmp_path):
    path = Script.load("fsdp").write(tmp_path / "mine.py")

    with pytest.raises(ScriptError, match=r"mine.py takes no parameter 'save_every'; the extra checkpoints has it"):
        prepared(path, {"save_every": 1})


def test_a_launch_completes_and_checks_what_it_runs():
    assert prepared("ddp", {"save_every": 5}, args=["--clip", "1"]).script == Script.load(
        "ddp", "checkpoints", "clip_and_schedule"
    )
    assert prepared("ddp", {"save_every": None}).script == Script.load("ddp")
    assert prepared(Script.load("ddp"), {"save_every": 5}).parameters == {"save_every": "5"}


STRATEGY = """import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    mine = DistributedDataParallel(model.to(device))
    return mine


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)
"""


def test_a_strategy_of_ones_own_works_with_the_extras_of_the_one_that_it_replaces():
    ddp, fsdp = Script.load("ddp"), Script.load("fsdp")
    mine = ddp.with_cells(strategy=STRATEGY)

    accumulating = prepared(mine, {"accumulate": 2}).script

    assert accumulating.cells["gradient_sync"] == Script.load("ddp", "accumulate").cells["gradient_sync"]
    assert accumulating.cells["strategy"] == mine.cells["strategy"]
    sharded = fsdp.with_cells(strategy=fsdp.cells["strategy"].text + "\n\nMINE = 1\n")
    assert "initialized(model, device, args)" in completed(sharded, ["meta_device"]).cells["main"].text
    assert strategy_of(sharded) == strategy_of(mine) == ""


def test_a_strategy_that_nothing_names_is_told_what_an_extra_uses_of_it():
    mine = Script.parse(str(Script.load("ddp").with_cells(strategy=STRATEGY)).replace("Train with DDP", "Mine"))

    refused(
        lambda: prepared(mine, {"accumulate": 2}),
        "the 'step' cell uses gradient_sync, which no cell of the script defines",
        "Define gradient_sync(model, last) in a cell of yours",
    )
    own = "\n\ndef gradient_sync(model, last):\n    return model.no_sync()\n"
    script = prepared(mine.with_cells(strategy=STRATEGY + own), {"accumulate": 2}).script
    assert str(script).count("def gradient_sync") == 1


def test_a_strategy_of_ones_own_keeps_parameters_in_fp32_or_is_refused():
    model = Script.load("ddp").cells["model"].text.replace("bias=False)\n", "bias=False)\n        self.half()\n", 1)
    line = "return DistributedDataParallel(placed(model, device, args), gradient_as_bucket_view=True)"

    refused(lambda: Script.load("ddp").with_cells(strategy=STRATEGY, model=model), "'strategy' cell is your own", line)
    assert "self.half()" in model
    served = STRATEGY.replace("model.to(device)", "placed(model, device, args)")
    assert "precision" in Script.load("ddp").with_cells(strategy=served, model=model).cells


def test_a_session_that_ends_brings_the_checkpoints_unless_they_are_ones_own(monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.launcher.prepare.seconds_to_train", lambda: 1000.0)
    ddp = Script.load("ddp")
    mine = ddp.with_cells(
        checkpoints="""class Checkpoints:
    start = 0

    def __init__(self, model, optimizer, device, args):
        pass

    def after_step(self, step, total_steps, stopped):
        return stopped
"""
    )
    nowhere = {"PYTHONHOME": str(tmp_path / "nowhere")}  # no rank ever runs

    saving, own = (labkit.launch(script, nproc_per_node=2, wait=False, env=nowhere) for script in (ddp, mine))

    assert saving.script == Script.load("ddp", "checkpoints")
    assert [*saving.folder.read_manifest().args[:3]] == ["--deadline-seconds", "1000", "--checkpoint-dir"]
    assert own.script == mine
    assert [*own.folder.read_manifest().args] == []


def test_the_options_of_a_strategy_are_those_of_its_cells_and_of_extras_for_it():
    assert set(options_of_strategy(Script.load("pipeline"))) >= {"schedule", "virtual_stages"}
    assert set(options_of_strategy(Script.load("hybrid"))) >= {"tensor", "pipeline", "schedule", "virtual_stages"}
    assert "accumulate" not in options_of_strategy(Script.load("pipeline"))
    assert "precision" not in options_of_strategy(Script.load("ddp", "precision"))
    assert "static_graph" in options_of_strategy(Script.load("ddp"))
    assert set(options_of_strategy(Script.parse('# %% strategy\np.add_argument("--mine")\n'))) == {"mine"}


def test_the_options_of_extras_are_those_that_can_be_added():
    extras = extra_options(Script.load("ddp", "precision"))

    assert "save_every" in extras["checkpoints"]
    assert "precision" not in extras
    assert "fsdp_options" not in extras
    assert "accumulate" not in extra_options(Script.load("pipeline"))


def test_the_strategy_is_known_by_its_cell():
    ddp = Script.load("ddp")

    assert strategy_of(Script.parse(str(ddp), name="mine")) == "ddp"
    assert strategy_of(Script.load("ddp", "ddp_options", "accumulate")) == "ddp"
    assert strategy_of(ddp.with_cells(strategy=ddp.cells["strategy"].text + "\nMINE = 1\n")) == ""
    assert strategy_of(Script.parse("x = 1\n")) == ""


def test_a_panel_may_compose_at_every_move(monkeypatch):
    """Nothing is parsed a second time."""

    def compose():
        script = completed(Script.load("fsdp", "precision", task="digits"), ["save_every", "clip"])
        return options_of(script), options_of_strategy(script), extra_options(script)

    first, parsed = compose(), []
    monkeypatch.setattr(ast, "parse", lambda text, *_: parsed.append(text))
    assert compose() == first
    assert parsed == []


# ---- cells of one's own


def test_a_text_is_used_verbatim_and_missing_names_are_reported():
    refused(
        lambda: Script.load("ddp").with_cells(model=RESNET),
        "the 'model' cell must define Model(); yours defines ResNet. End it with `Model = ResNet`",
    )


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pipeline"])
def test_a_live_class_of_another_name_is_called_by_the_one_the_script_uses(live, strategy):
    text = "class ResNet:\n    def __init__(self, width=3):\n        self.width = width\n"

    script = Script.load(strategy).with_cells(model=live(text, "ResNet"))

    assert script.cells["model"].text == f"{text}\nModel = ResNet\n\n\n"
    script.check()


@pytest.mark.parametrize(
    ("title", "wanted", "text"),
    [
        ("optimizer", "optimizer_of", "def my_adam(parameters, args):\n    return None\n"),
        ("model", "Model", "def make_resnet():\n    return None\n"),
        ("layers", "change_layers", "def mine(model, args):\n    pass\n"),
    ],
)
def test_a_function_of_another_name_too(live, title, wanted, text):
    name = text.split("(")[0].removeprefix("def ")

    script = Script.load("zero1").with_cells(**{title: live(text, name)})

    assert script.cells[title].text.endswith(f"\n\n{wanted} = {name}\n\n\n")
    script.check()


def test_nothing_is_renamed_where_a_cell_must_define_several_names(live):
    smoothed = live("def smoothed(outputs, batch):\n    return outputs.sum()\n", "smoothed")

    refused(
        lambda: Script.load("ddp").with_cells(task=smoothed),
        "the 'task' cell must define ",
        "count_of(batch), loss_of(outputs, batch), metrics_of(outputs, batch), outputs_of(model, batch)",
        "; yours defines smoothed",
    )


def test_a_class_of_an_installed_package_is_imported():
    from torch.nn import Transformer
    from torch.optim import Adam

    model = Script.load("ddp").with_cells(model=Transformer)

    assert model.cells["model"].text == "from torch.nn import Transformer\n\nModel = Transformer\n\n\n"
    assert model.cells["model"].origin == "from torch.nn import Transformer"
    refused(
        lambda: Script.load("ddp").with_cells(optimizer=Adam),
        "the 'optimizer' cell is called as optimizer_of(parameters, args), where args are the script's options; "
        "Adam takes lr there. Pass a function with these parameters that calls it",
    )
    refused(
        lambda: Script.load("ddp").with_cells(model=__import__("torch").nn.Linear),
        "the 'model' cell: Model is called without arguments, but yours is Model(in_features, out_features",
    )


def test_a_function_replaces_its_namesake_alone(live):
    text = "from torch.nn import functional as F\n\n\ndef smoothed(outputs, batch):\n"
    text += "    return F.cross_entropy(outputs, batch[1], label_smoothing=0.1, reduction='sum')\n"
    ddp = Script.load("ddp")

    script = ddp.with_cells(loss_of=text.replace("smoothed", "loss_of"))

    task = script.cells["task"]
    assert "label_smoothing" in task.text
    assert task.text.count("def loss_of") == 1
    assert ddp.cells["task"].defines <= task.defines
    script.check()
    assert [title for title in ddp.cells if ddp.cells[title] != script.cells[title]] == ["task"]
    alone = "def smoothed(outputs, batch):\n    return outputs.sum()\n"
    assert "\nloss_of = smoothed\n" in ddp.with_cells(loss_of=live(alone, "smoothed")).cells["task"].text


def test_a_value_replaces_its_namesake():
    script = Script.load("tensor_parallel").with_cells(TENSOR_PLAN={"up": "colwise", "down": "rowwise"})

    assert "\nTENSOR_PLAN = {'up': 'colwise', 'down': 'rowwise'}\n" in script.cells["tensor"].text


def test_an_option_is_no_cell():
    refused(lambda: Script.load("ddp").with_cells(global_batch_size=8), "an option of the script: pass it to launch(")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("loss", "loss_of in the cell 'task': pass with_cells(loss_of=…)"),
        ("metric", "metrics_of in the cell 'task': pass with_cells(metrics_of=…)"),
        (
            "my_optimizer",
            "make_optimizer in the cell 'strategy', optimizer_of in the cell 'optimizer': pass with_cells(",
        ),
    ],
)
def test_an_unknown_cell_is_answered_with_the_functions_that_are_called_like_it(key, said):
    refused(lambda: Script.load("ddp").with_cells(**{key: max}), f"no cell is titled '{key}'; the script has {said}")


def test_two_names_of_a_cell_may_be_replaced_together():
    script = Script.load("ddp").with_cells(
        loss_of="def loss_of(outputs, batch):\n    return outputs.sum()\n",
        metrics_of="def metrics_of(outputs, batch):\n    return {}\n",
        collate="def collate(samples):\n    return samples\n",
    )

    assert "return {}" in script.cells["task"].text
    assert "outputs.sum()" in script.cells["task"].text
    assert "default_collate  #" not in script.cells["data"].text
    script.check()


def test_functions_of_one_notebook_cell_may_replace_several_names(notebook):
    cell = notebook(
        "def my_loss(outputs, batch):\n    return outputs.sum()\n\n\n"
        "def my_outputs(model, batch):\n    return model(batch)\n"
    )

    script = Script.load("ddp").with_cells(outputs_of=cell["my_outputs"], loss_of=cell["my_loss"])

    task = {}
    exec(script.cells["task"].text, task)
    assert (task["outputs_of"], task["loss_of"]) == (task["my_outputs"], task["my_loss"])


def test_a_missing_import_is_reported_even_if_the_cell_of_another_title_had_it(notebook):
    model = notebook("from torch import nn\nfrom torch.nn import functional as F\n\n\n" + RESNET)["ResNet"]
    task = Script.load("ddp").cells["task"].text.replace("from torch.nn import functional as F\n", "")

    refused(
        lambda: Script.load("ddp").with_cells(model=model, task=task), "the 'task' cell uses F without importing it"
    )


def test_the_missing_imports_of_all_cells_are_reported_together():
    ddp = Script.load("ddp")
    task, loader = (ddp.cells[title].text.replace("import torch\n", "") for title in ("task", "loader"))

    with pytest.raises(ScriptError) as caught:
        ddp.with_cells(task=task, loader=loader)
    assert re.findall(r"the '(\w+)' cell uses torch without importing it", str(caught.value)) == ["task", "loader"]


def test_a_missing_name_is_reported_with_how_to_replace_one_name_alone():
    refused(
        lambda: Script.load("ddp").with_cells(task="def loss_of(outputs, batch):\n    return outputs.sum()\n"),
        "the 'task' cell must define ",
        "count_of(batch), metrics_of(outputs, batch), outputs_of(model, batch)",
        "yours defines loss_of",
        "with_cells(loss_of=…)",
    )


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            {"optimizer": "def optimizer_of(parameters):\n    return None\n"},
            "optimizer_of is called as optimizer_of(parameters, args), but yours is optimizer_of(parameters)",
        ),
        (
            {"model": "class Model:\n    def __init__(self, width):\n        pass\n"},
            "Model is called without arguments, but yours is Model(width)",
        ),
        (
            {"loss_of": "def loss_of(outputs, batch, more):\n    return 0\n"},
            "loss_of is called as loss_of(outputs, batch), but yours is loss_of(outputs, batch, more)",
        ),
    ],
    ids=["too few", "a class that needs one", "too many"],
)
def test_parameters_that_cannot_be_passed_are_refused_before_a_rank_starts(cells, words):
    refused(lambda: Script.load("ddp").with_cells(**cells), words)


@pytest.mark.parametrize(
    "text",
    [
        "def optimizer_of(parameters, args, more=None):\n    return None\n",
        "def optimizer_of(*everything):\n    return None\n",
        "import functools\n\n\n@functools.cache\ndef optimizer_of():\n    return None\n",
        "optimizer_of = max\n",
        "def optimizer_arguments(parser):\n    parser.add_argument('--momentum')\n\n\n"
        "def optimizer_of(parameters, args):\n    return args.momentum\n",
    ],
)
def test_parameters_that_can_be_passed_or_cannot_be_known_pass(text):
    Script.load("fsdp").with_cells(optimizer=text).check()


OPTIMIZER = """import torch


def optimizer_arguments(parser):
    parser.add_argument("--momentum", type=float, default=0.9)


def optimizer_of(parameters, args):
    return torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum)
"""


def test_a_cell_of_ones_own_brings_its_lines_as_an_extra_does():
    ddp, observed = Script.load("ddp"), "\n\ndef observed(model):\n    return {}\n"
    model = ddp.cells["model"].text

    script = ddp.with_cells(optimizer=OPTIMIZER, model=model + observed)

    assert 'optimizer_arguments(parser.add_argument_group("optimizer"))' in script.cells["parameters"].text
    assert command_line(script, {"momentum": 0.5}) == ["--momentum", "0.5"]
    assert "values |= observed(model)" in script.cells["main"].text
    assert script.with_cells(optimizer=ddp.cells["optimizer"].text, model=model) == ddp


def test_a_name_of_ones_own_is_not_taken_for_the_title_of_a_cell():
    ddp = Script.load("ddp")
    mine = ddp.with_cells(model=ddp.cells["model"].text + "\n\nlayers, base, blocks, export = 1, 2, 3, 4\n")

    assert {title for title in ddp.cells if mine.cells[title] != ddp.cells[title]} == {"model"}


def test_a_cell_that_an_extra_has_comes_with_its_lines_by_its_title_or_by_a_name():
    script = Script.load("ddp").with_cells(
        layers="def change_layers(model, args):\n    pass\n",
        lr_factor="def lr_factor(step, total_steps, args):\n    return 1.0\n",
    )

    assert "change_layers(model, args)\n" in script.cells["main"].text
    assert "return 1.0" in script.cells["schedule"].text
    assert command_line(script, {"clip": 1.0}) == ["--clip", "1.0"]
    refused(lambda: Script.load("ddp").with_cells(layer="x = 1\n"), "no cell is titled 'layer'")


@pytest.mark.parametrize(
    ("cells", "signature"),
    [
        (
            {"step": "def forward_backward(model, batch, data, scaler, args):\n    return 0\n"},
            "forward_backward is called as forward_backward(model, batch, dp_mesh, args)",
        ),
        (
            {"update": "def update(model, optimizer, scaler, mesh, step, total_steps, args):\n    return {}\n"},
            "update is called as update(model, optimizer, mesh, step, total_steps, args)",
        ),
        (
            {"validate": "def validate(step, total_steps, measure, notes, args):\n    return None\n"},
            "validate is called as validate(step, total_steps, measure, args)",
        ),
    ],
    ids=["step", "update", "validate"],
)
def test_a_cell_for_an_older_script_is_refused_with_what_it_is_called_with(cells, signature):
    refused(lambda: Script.load("ddp").with_cells(**cells), signature, "Change its parameters")


OWN = "\n\nMINE = 1\n"


@pytest.mark.parametrize(
    ("strategy", "title", "options"),
    [
        ("ddp", "main", ["precision"]),
        ("ddp", "main", ["validate_every", "precision", "save_every", "export"]),
        ("fsdp", "main", ["save_every", "meta_device", "validate_every"]),
        ("ddp", "step", ["clip", "precision"]),
        ("ddp", "parameters", ["save_every"]),
    ],
)
def test_a_cell_of_ones_own_receives_the_lines_of_an_extra(strategy, title, options):
    script = Script.load(strategy)
    mine = completed(script.with_cells(**{title: script.cells[title].text.rstrip() + OWN}), options)

    assert mine.cells[title].text.strip() == f"{completed(script, options).cells[title].text.rstrip()}{OWN}".strip()
    mine.check()


def test_a_cell_of_ones_own_receives_lines_as_deep_as_its_own_are():
    script = Script.load("ddp")
    text = script.cells["main"].text.replace("    model = Model()\n", "    if True:\n        model = Model()\n")

    mine = completed(script.with_cells(main=text), ["precision"])

    assert "    if True:\n        model = Model()\n        model = in_precision(model, device, args)\n" in str(mine)


def test_a_cell_that_ends_where_a_line_belongs_receives_it_there():
    base, own = Cell("x", "a = 1\n\n# with more: b = 2\n"), Cell("x", "a = 1\n\n")

    assert with_lines_of(base, own, ("more",), ())[0].text == "a = 1\n\n\nb = 2"


REPORT = "                report(step=step, epoch=epoch, **{name: float(value) for name, value in values.items()})\n"


@pytest.mark.parametrize(
    "new",
    [f"                if epoch >= 0:\n    {REPORT}", f"{REPORT}                print(step)\n"],
    ids=["deeper", "a line more"],
)
def test_lines_below_a_block_stay_below_it_whatever_the_block_became(new):
    script = Script.load("ddp")
    assert REPORT in script.cells["main"].text
    mine = script.with_cells(main=script.cells["main"].text.replace(REPORT, new))

    text = completed(mine, ["validate_every", "save_every"]).cells["main"].text

    wanted = completed(script, ["validate_every", "save_every"]).cells["main"].text
    assert text.strip() == wanted.replace(REPORT, new).strip()


def test_a_changed_cell_of_an_extra_or_a_strategy_receives_its_own_lines():
    clip = Script.load("ddp", "clip_and_schedule")
    measured = "    return measured\n"
    assert measured in clip.cells["update"].text
    mine = clip.with_cells(update=clip.cells["update"].text.replace(measured, f"    print(1)\n{measured}"))
    assert "        scaler.unscale_(optimizer)\n" in completed(mine, ["precision"]).cells["update"].text

    fsdp = Script.load("fsdp")
    line = "def parallelize(model, mesh, device, args):\n"
    assert line in fsdp.cells["strategy"].text
    mine = fsdp.with_cells(strategy=fsdp.cells["strategy"].text.replace(line, f"{line}    print(1)\n"))
    assert '"mp_policy": policy_of(args)' in completed(mine, ["precision"]).cells["strategy"].text


def test_a_changed_cell_receives_the_lines_that_a_model_brings():
    script = Script.load("ddp")
    step = script.cells["step"].text.replace("    loss.backward()\n", "    loss.backward()\n    print(1)\n")

    mine = script.with_cells(model="import my_layers\n" + script.cells["model"].text, step=step)

    assert "    scaler.scale(loss).backward()\n    print(1)\n" in mine.cells["step"].text


@pytest.mark.parametrize(
    ("title", "old", "new", "option", "said"),
    [
        ("main", "if step == total_steps:", "if step >= total_steps:", "save_every", "has no place for a line"),
        ("main", "            if step == total_steps:", "            if args.steps:", "validate_every", "has no place"),
        (
            "step",
            "loss.backward()",
            "(loss / 2).backward()",
            "precision",
            "has no place for a line of this script's: scaler",
        ),
    ],
)
def test_a_cell_of_ones_own_that_has_no_place_for_a_line_of_an_extra_is_refused(title, old, new, option, said):
    text = Script.load("ddp").cells[title].text
    assert old in text
    mine = Script.load("ddp").with_cells(**{title: text.replace(old, new)})

    refused(lambda: completed(mine, [option]), f"the '{title}' cell is your own, and {said}")


def test_a_line_without_a_new_name_needs_a_place_as_well():
    text = Script.load("ddp").cells["evaluate"].text.replace("    sums = 0.0\n", "    sums = torch.zeros(())\n")
    mine = Script.load("ddp").with_cells(evaluate=text)

    refused(
        lambda: completed(mine, ["accumulate"]),
        "the 'evaluate' cell is your own, and has no place for a line of this script's: "
        "batch_size = max(1, batch_size // args.accumulate)",
    )
    own = text.replace("    model.eval()\n", "    batch_size //= args.accumulate\n    model.eval()\n")
    served = Script.load("ddp", "accumulate").with_cells(evaluate=own)
    assert served.cells["evaluate"].text.strip() == own.strip()


@pytest.mark.parametrize(
    ("title", "line", "option"),
    [
        ("update", "    scaler.update()\n", "save_every"),
        ("main", "    report(start_step=checkpoints.start)\n", "clip"),
        ("main", "            began += time.monotonic() - paused  # validation is not training\n", "precision"),
        (
            "evaluate",
            "    batch_size = max(1, batch_size // args.accumulate)  # as much memory as in training\n",
            "clip",
        ),
    ],
)
def test_a_line_that_was_left_out_stays_out(title, line, option):
    script = Script.load("fsdp", "precision", "checkpoints", "validate", "accumulate")
    if option == "precision":
        script = Script.load("fsdp", "checkpoints", "validate", "accumulate")
    text = script.cells[title].text
    assert text.count(line) == 1

    mine = script.with_cells(**{title: text.replace(line, "")})
    read = completed(Script.parse(str(mine)), [option])

    assert line not in mine.cells[title].text
    assert line not in read.cells[title].text
    assert line in script.with_cells(loss_of="def loss_of(outputs, batch):\n    return 0\n").cells[title].text


def test_a_cell_of_an_extra_may_not_be_left_unused():
    script = Script.load("ddp", "checkpoints")

    refused(lambda: script.with_cells(main=Script.load("ddp").cells["main"].text), "Checkpoints(model, optimizer")


REFORMATTED = [
    (
        "            loss = forward_backward(model, map_tensors(batch, on_device), dp_mesh, args)\n",
        "            loss = forward_backward(\n                model,\n                map_tensors(batch, on_device),\n"
        "                dp_mesh,\n                args,\n            )\n",
    ),
    (
        f"{'':16}report(step=step, epoch=epoch, **{{name: float(value) for name, value in values.items()}})\n",
        f"{'':16}report(\n{'':20}step=step,\n{'':20}epoch=epoch,\n"
        f"{'':20}**{{name: float(value) for name, value in values.items()}},\n{'':16})  # mine\n",
    ),
    ("    model = Model()\n", "    model = (  # mine\n        Model()\n    )\n"),
    ("            if step == total_steps:\n", "            if step == total_steps:  # the end\n"),
]


def test_a_reformatted_cell_receives_the_lines_of_an_extra():
    ddp = Script.load("ddp")
    text, options = ddp.cells["main"].text, ["validate_every", "save_every", "precision"]
    for before, after in REFORMATTED:
        assert before in text
        text = text.replace(before, after)
    mine = ddp.with_cells(main=text)
    assert mine.cells["main"].text.strip() == text.strip()

    script = completed(mine, options)

    assert script.cells["main"].code == completed(ddp, options).cells["main"].code
    assert all(after in script.cells["main"].text for _, after in REFORMATTED[:3])
    assert (
        strategy_of(
            Script.parse(str(ddp).replace("return DistributedDataParallel(", "return (DistributedDataParallel)("))
        )
        == "ddp"
    )


def test_a_line_within_a_call_is_placed_as_deep_as_its_neighbours():
    fsdp1 = Script.load("fsdp1")
    mine = fsdp1.with_cells(strategy=fsdp1.cells["strategy"].text.rstrip() + OWN)

    text = completed(mine, ["precision"]).cells["strategy"].text

    assert "        mixed_precision=half,\n" in text
    assert text.strip() == (completed(fsdp1, ["precision"]).cells["strategy"].text.rstrip() + OWN).strip()


@pytest.mark.parametrize("broken", ["def f(:\n", "x = (\n", "if x:\n    a\n  b\n", "x = '\0'\n", "é = '"])
def test_a_file_that_python_cannot_read_has_no_strategy(broken):
    script = Script.parse(f"{Script.load('ddp').head}# %% strategy\n{broken}")

    assert (strategy_of(script), is_library(script)) == ("", False)


def test_composing_with_cells_of_ones_own_parses_nothing_twice(monkeypatch):
    mine = Script.load("ddp").with_cells(main=Script.load("ddp").cells["main"].text + OWN)

    first, parsed = completed(mine, ["save_every", "clip"]), []
    monkeypatch.setattr(ast, "parse", lambda text, *_: parsed.append(text))
    assert completed(mine, ["save_every", "clip"]) == first
    assert parsed == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_model_of_16_bits_brings_the_cell_that_trains_it_in_fp32(strategy):
    text = "import torch\nfrom transformers import AutoModelForCausalLM\n\n\ndef Model():\n    return {}\n"
    ddp = Script.load(strategy)

    for made in ("AutoModelForCausalLM.from_pretrained('mine')", "torch.nn.Linear(1, 1).to(torch.bfloat16)"):
        script = ddp.with_cells(model=text.format(made))
        assert "placed(" in script.cells["strategy"].text
        assert options_of(script)["precision"].default == "fp32"
        script.check()
    assert "precision" in ddp.with_cells(model="from my_models import Model\n").cells  # whatever its parameters are
    within = "def Model():\n    from my_models import build\n\n    return build()\n"
    assert "precision" in ddp.with_cells(model=within).cells
    assert "precision" in ddp.with_cells(model=text.format("torch.load('mine.pt', weights_only=False)")).cells
    own = text.format("torch.nn.Linear(1, 1)").replace("from transformers import AutoModelForCausalLM\n", "")
    assert "precision" not in ddp.with_cells(model=own).cells


def test_only_blocks_of_the_model_itself_spare_the_search_for_them():
    script = Script.load("fsdp")
    text = script.cells["model"].text
    assert "self.blocks" in text and "blocks" not in script.cells
    inner = text.replace("class Model(", "class Encoder(") + (
        "\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.encoder = Encoder()\n        # self.blocks = nn.ModuleList([Block(1) for _ in range(2)])\n\n"
        "    def forward(self, *inputs):\n        return self.encoder(*inputs)\n"
    )

    assert "blocks" in script.with_cells(model=inner).cells
    renamed = text.replace("class Model(", "class Mine(") + "\n\nModel = Mine\n"
    assert "blocks" not in script.with_cells(model=renamed).cells


@pytest.mark.parametrize(
    ("blocks", "found", "said"),
    [
        (lambda nn: 4, ["layers.0", "layers.1"], ""),
        (lambda nn: nn.Linear(1, 1), ["layers.0", "layers.1"], ""),  # a module, but no list of any
        (lambda nn: nn.ModuleDict({"a": nn.Linear(99, 99), "b": nn.ReLU()}), ["blocks.a", "blocks.b"], ""),
        (lambda nn: [], ["layers.0", "layers.1"], ""),
        (
            lambda nn: nn.Sequential(nn.Linear(1, 1)),
            ["blocks.0"],
            "1 repeated layers (.blocks) of Net hold 2 of 182 parameters: the rest",
        ),
    ],
)
def test_blocks_are_a_list_of_layers_or_are_looked_for(blocks, found, said, capsys):
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.blocks = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)]), blocks(nn)

    names: dict[str, object] = {}
    exec(library().extras["find_blocks"].cells[0].text, names)
    model = Net()
    of = {module: name for name, module in model.named_modules()}

    assert [of[block] for block in names["blocks_of"](model)] == found
    printed = capsys.readouterr().out
    assert said in printed and bool(said) == bool(printed)


def test_two_heads_are_no_blocks_without_a_word(capsys):
    from torch import nn

    model = nn.ModuleDict({"body": nn.Linear(99, 99), "heads": nn.ModuleList([nn.Linear(9, 2), nn.Linear(9, 3)])})
    names: dict[str, object] = {}
    exec(library().extras["find_blocks"].cells[0].text, names)

    assert len(names["blocks_of"](model)) == 2
    assert "2 repeated layers (.blocks) of ModuleDict hold 50 of 9,950 parameters" in capsys.readouterr().out


def test_a_cell_of_ones_own_brings_its_own_imports():
    text = RESNET.removeprefix("from torch import nn\n\n\n") + "\n\nModel = ResNet\n"

    said = refused(
        lambda: Script.load("pipeline").with_cells(model=text), "the 'model' cell uses nn without importing it"
    )

    assert said.endswith("Add `from torch import nn`")


def test_a_class_of_another_name_is_replaced_together_with_a_cell_that_uses_it():
    ddp = Script.load("ddp")
    script = ddp.with_cells(model=OrderedDict, main=ddp.cells["main"].text)
    assert "Model = OrderedDict" in script.cells["model"].text


def test_a_missing_import_is_found_at_the_launch_as_well():
    """An extra may take away the cell that defined it."""
    mine = Script.load("ddp").with_cells(
        optimizer="def optimizer_of(parameters, args):\n    return report(lr=args.lr)\n"
    )

    prepared(mine, {})
    borrowed = mine.cells["optimizer"].text.replace("report(lr", "torch.optim.SGD(parameters, lr")
    object.__setattr__(mine.cells["optimizer"], "text", borrowed)
    for name in ("_table", "uses", "reads", "defines", "_bindings", "imports"):
        mine.cells["optimizer"].__dict__.pop(name, None)
    with pytest.raises(ScriptError, match="the 'optimizer' cell uses torch without importing it: .* `import torch`"):
        prepared(mine, {})


@pytest.mark.parametrize(
    ("text", "names", "other"),
    [
        ("def Model():\n    return 0\n\n\ndef load_datasets(data_dir):\n    return 1\n", "load_datasets", "data"),
        ("from time import time\n\n\ndef Model():\n    return time()\n", "time", "main"),
    ],
)
def test_a_name_that_another_cell_would_replace_is_refused(text, names, other):
    refused(
        lambda: Script.load("ddp").with_cells(model=text),
        f"the 'model' cell and the script's '{other}' cell both define {names}",
        f"pass the '{other}' cell as well",
    )


def test_the_same_import_in_other_words_is_no_clash():
    text = "import torch.nn as nn\nimport torch.nn.functional as F\n\n\ndef Model():\n    return nn, F\n"

    Script.load("ddp").with_cells(model=text)


@pytest.mark.parametrize(
    ("line", "is_checked"),
    [
        ("names = list(globals().items())", True),
        ("x = globals()['y']", True),
        ("x = globals().get('y') == 1", True),
        ("x = 'y' in globals()", True),
        ("globals()['y'] = 1", False),
        ("globals()['y'] |= 1", False),
        ("globals().update(y=1)", False),
        ("g = globals()", False),
        ("exec('y = 1')", False),
        ("from math import *", False),
    ],
)
def test_only_what_brings_names_from_elsewhere_switches_the_name_check_off(line, is_checked):
    script = Script.parse(f"# %% a\n{line}\n# %% b\ndef f():\n    return nobody_defines_this\n")

    if is_checked:
        refused(script.check, "the 'b' cell uses nobody_defines_this")
    else:
        script.check()


# ---- shown


def test_names_lists_what_there_is():
    names = Script.names()

    assert set(names.strategies) == set(script_names())
    assert names.extras["checkpoints"]
    assert names.tasks["bytes"]
    for word in (*names.strategies, *names.extras, *names.tasks, "--save-every"):
        assert word in str(names)
    assert repr(names) == str(names)
    bundle = names._repr_mimebundle_()
    assert bundle["text/plain"] == str(names)
    assert bundle["text/html"].count("<tr>") == 3 + len(names.strategies) + len(names.extras) + len(names.tasks)


def test_the_strategys_cells_and_ones_own_are_open(live):
    script = Script.load("pipeline").with_cells(model="# <b>\nModel = max\n")

    page = script._repr_mimebundle_()["text/html"]

    opened = re.findall(r"<details open><summary[^>]*><code># %% (\w+)<", page)
    assert set(opened) == {"model", "strategy", "hub_stages", "step"}
    assert page.count("<details") == len(script.parts)
    assert "text passed to with_cells" in page
    assert "<b>\n" not in page
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for cell in script.parts:
        assert cell.text.strip() in text


def test_the_text_is_printed_by_the_terminals_verb(capsys, tmp_path):
    assert main(["write", "fsdp", "checkpoints", "--task", "digits"]) == 0
    assert capsys.readouterr().out == str(Script.load("fsdp", "checkpoints", task="digits"))
    assert main(["write"]) == 0
    assert capsys.readouterr().out.strip() == str(Script.names())
    assert main(["write", "fdsp"]) == 2
    assert "did you mean 'fsdp'?" in capsys.readouterr().err
    assert main(["diff", "ddp", "fsdp"]) == 0
    assert "+    for module in [*model.blocks, model]:" in capsys.readouterr().out


def test_the_help_of_a_launch_names_the_extras_options(capsys):
    assert main(["launch", "ddp", "--help"]) == 0

    shown = capsys.readouterr().out
    assert re.search(r"^  --global-batch-size  \(default: 64\)$", shown, re.MULTILINE)
    assert re.search(r"^  checkpoints: .*--save-every", shown, re.MULTILINE)
    assert "fsdp_options" not in shown


def test_only_the_librarys_own_cells_are_not_checked_for_mistakes_before_a_launch():
    assert is_library(Script.load("fsdp", "checkpoints", task="digits"))
    assert not is_library(Script.load("fsdp").with_cells(model="Model = max\n"))


class Net:
    def forward(self):
        return 1


def test_objects_instead_of_names_and_instances_instead_of_classes_are_refused():
    with pytest.raises(ScriptError, match=r"task must be a name that .*with_cells\(…\), got <built-in function len>"):
        Script.load("ddp", task=len)
    with pytest.raises(ScriptError, match="got an instance of Net; pass the class"):
        Script.load("ddp").with_cells(model=Net())

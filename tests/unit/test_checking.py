"""Every rule finds its mistake once, at its line; nothing is found where nothing is wrong; whatever cannot be read is
refused in one sentence; and before a launch the checker warns, and never stands in the way."""

import ast
import inspect
import io
import json
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient

import labkit
from labkit import Script, ScriptError
from labkit.checking import check
from labkit.checking.checker import warn
from labkit.checking.findings import KINDS
from labkit.checking.rules import RULES
from labkit.checking.rules.outdated import REPLACED
from labkit.checking.syntax.collectives import COLLECTIVES
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.values import UNKNOWN
from labkit.cli import main
from labkit.worker.witness import joined
from labkit.write import script_names
from unit.composed import combinations
from unit.seeded import (
    DDP_MODEL,
    FSDP1_MODEL,
    FSDP2_MODEL,
    FSDP_NET,
    LOOP,
    SEEDED,
    TEACHER,
    buffer,
    follows,
    within,
    writing,
)

ROOT = Path(__file__).parents[2]
PAIRS = [
    pytest.param(slug, *pair, id=f"{slug}-{i}") for slug, pairs in SEEDED.items() for i, pair in enumerate(pairs, 1)
]
BARRIER, CORRECTED = SEEDED["rank-0-collective"][0]
LINE = BARRIER.splitlines().index("    dist.barrier()  # HERE") + 1


def rules_in(text):
    return [(finding.rule, finding.line) for finding in check(Script.parse(text))]


def test_every_rule_has_a_mistake_to_find():
    assert set(SEEDED) == set(RULES)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.slug)
def test_a_rule_says_what_it_does_why_what_to_do_and_what_it_misses(rule):
    assert rule.kind in KINDS
    assert all(text[0].isalnum() or text[0] in ".'" for text in (rule.why, rule.fix, rule.misses))
    assert rule.why.endswith(".")
    assert rule.misses.endswith(".")


@pytest.mark.parametrize(("slug", "mistaken", "corrected"), PAIRS)
def test_a_mistake_is_found_once_at_its_line_and_not_in_the_corrected_script(slug, mistaken, corrected):
    (line,) = [number for number, text in enumerate(mistaken.splitlines(), 1) if "HERE" in text]

    assert rules_in(mistaken) == [(slug, line)]
    assert rules_in(corrected) == []


@pytest.mark.parametrize(("slug", "mistaken", "corrected"), PAIRS)
def test_a_comment_silences_its_rule_on_its_line_and_no_other(slug, mistaken, corrected):
    assert rules_in(mistaken.replace("# HERE", f"# labkit: ignore[another-rule, {slug}]")) == []
    assert rules_in(mistaken.replace("# HERE", "# labkit: ignore[another-rule]"))[0][0] == slug
    number = RULES[slug].number
    for silencing in ("# noqa", f"# noqa: E501, {number}", f"# NOQA:{number.lower()}", "# noqa: LK"):
        assert rules_in(mistaken.replace("# HERE", silencing)) == []
    assert rules_in(mistaken.replace("# HERE", "# noqa: E501"))[0][0] == slug


@pytest.mark.parametrize("name", script_names())
def test_nothing_is_found_in_our_own_scripts(name):
    assert not check(name)
    for extras in combinations(name):
        assert not check(Script.load(name, *extras)), extras


@pytest.mark.parametrize("task", Script.names().tasks)
def test_nothing_is_found_in_our_own_tasks(task):
    assert not check(Script.load("fsdp", task=task))


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_nothing_is_found_in_the_labs(path):
    assert not check(path)


# What the rule says is true of a file from a GPU; that none is loaded without the option, the text does not tell.
TRUE_OF_A_GPU = {"checkpoint_optional_empty.py": ["load-without-map-location"]}


@pytest.mark.parametrize("path", sorted((ROOT / "tests/witness/correct").glob("*.py")), ids=lambda path: path.stem)
def test_no_right_training_is_accused_of_hanging_or_being_wrong(path):
    accused = [finding.rule for finding in check(path) if finding.kind in ("hangs", "wrong")]

    assert accused == TRUE_OF_A_GPU.get(path.name, [])


EVALUATION = """
for _ in range(9):
    for x in train_loader:
        loss = model(x)
        loss.backward()
    score = 0
    for x in test_loader:
        loss = model(x)
        score += loss.item()
    if score < best:
        break
"""


def test_only_an_evaluation_on_a_part_of_the_data_makes_a_decision_a_ranks_own():
    whole = "test_loader = DataLoader(test, 8)\n"
    part = "test_loader = DataLoader(test, 8, sampler=DistributedSampler(test, shuffle=False))\n"

    assert rules_in(within(whole + EVALUATION)) == []
    assert [rule for rule, _ in rules_in(within(part + EVALUATION))] == ["rank-decides-alone"]


@pytest.mark.parametrize(
    "body",
    [
        "if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()",  # one after another
        "if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)",
        "if rank in (0, 1):\n    dist.all_reduce(x, group=pair)",
        "if rank == 0:\n    dist.barrier(pair)\nif rank == 0:\n    dist.broadcast(x, 0, pair)",
        "if lora_rank == 0:\n    dist.barrier()",
        "if rank == -1:\n    dist.barrier()",  # which is how some say that there is only one
        "if step and rank == 0:\n    dist.barrier()\nelif step:\n    dist.barrier()",
        "if distributed and rank != 0:\n    dist.barrier()\nif not distributed or rank == 0:\n    dist.barrier()",
        "stop = rank == 0 and bad(x)\nstops = [stop]\ndist.broadcast_object_list(stops)\nif stops[0]:\n"
        "    dist.barrier()",
        "flag = seen(path) if rank == 0 else False\nflag = torch.tensor(flag)\ndist.broadcast(flag, 0)\nif flag:\n"
        "    dist.barrier()",
        "class Ordered:\n    def __enter__(self):\n        if rank != 0:\n            dist.barrier()\n\n"
        "    def __exit__(self, *error):\n        if rank == 0:\n            dist.barrier()",
        "def work():\n    while True:\n        dist.barrier()\n\ndef answer(x):\n    dist.barrier()\n\n"
        "if rank == 0:\n    serve(answer)\nelse:\n    work()",
        "alone = dist.new_group([rank])",
        "for _ in range(9):\n    try:\n        op(x).backward()\n    except Exception:\n        print('no backward')",
        "n = 0\nfor batch in loader:\n    model(batch).backward()\n    n += torch.numel(batch) + batch.size()[1]\n"
        "    if n > 9:\n        break",
        "import lightning\ntrainer = lightning.Trainer(devices=1)\nif trainer.is_global_zero:\n"
        "    trainer.save_checkpoint(path)",
        "should_save = step % 10 == 0\nif should_save:\n    dist.barrier()",
        "if self.control.should_save:\n    dist.barrier()",  # of transformers: the same on all ranks
        "if rank == 0:\n    dist.init_process_group(world_size=1)\n    dist.barrier()",
        "import sys\nif rank != 0:\n    sys.exit('one rank only')\ndist.barrier()",
        "state = torch.distributed.checkpoint.state_dict.get_model_state_dict(model) if rank == 0 else None",  # DDP
        "def meet():\n    if dist.is_initialized():\n        dist.barrier()\n\nmeet()",
        "if rank == 0:\n    model.eval()\n    print(model.training)",
        "if rank == 0:\n    model.module(x)",
        "@rank_zero_only\ndef save():\n    torch.save(x, 'x.pt')\n\nsave()",
        "from tools import master_only\n\n@master_only\ndef save():\n    torch.save(x, 'x.pt')\n\nsave()",
        "def alone(f):\n    return f if rank == 0 else print\n\n@alone\ndef save():\n    torch.save(x, 'x')\n\nsave()",
        "def save():\n    if rank:\n        return\n    torch.save(x, 'x.pt')\n\nsave()",
        "match dist.get_rank():\n    case 0:\n        torch.save(x, 'x.pt')",
        "keep = args.save and rank == 0\nif keep:\n    torch.save(x, 'x.pt')",
        "import io\nbuffer = io.BytesIO()\ntorch.save(x, buffer)",
        "torch.manual_seed(rank)\nloader = DataLoader(train, shuffle=True)",
        "loader = DataLoader(TensorDataset(torch.randn(9, 9)), shuffle=True)",
        "test_loader = DataLoader(test_set, shuffle=True)",
        "optimizer = torch.optim.SGD(model.parameters())\nmodel = DDP(model)",  # DDP keeps the parameters
        "loss = criterion(x, reduction='sum') / world_size\nloss.backward()",
        "state = torch.load(path, map_location=device, weights_only=False)",
        "dist = distance(a, b)",
        "if 0 <= rank:\n    dist.barrier()",  # it says that there is a rank
        "if 0 > rank:\n    dist.barrier()",
        "if rank != 0:\n    raise ValueError(rank)\ndist.barrier()",  # which ends those that wait
        "used = torch.cuda.memory_allocated(device=0)",
        "net = Net().cuda()\nnet = Other()\nnet = FSDP(net, auto_wrap_policy=policy)",
    ],
)
def test_what_looks_like_a_mistake_and_is_none_is_passed_over(body):
    assert rules_in(within(body)) == []


@pytest.mark.parametrize(
    "condition",
    [
        "rank < 1",
        "rank >= 1",
        "0 < rank",
        "1 > rank",
        "rank",
        "(r := dist.get_rank()) == 0",
        "os.environ['RANK'] == '0'",
        "os.getenv('LOCAL_RANK', '0') == '0'",
        "not (step % 10 or rank != 0)",
        "rank == 0 or step % 10",
        "step and not (x or not rank == 0)",
        "rank % torch.cuda.device_count() == 0",
        "rank == 3",
        "rank != 3",
        "accelerator.is_main_process",
        "trainer.is_global_zero",
        "state.is_world_process_zero",
        "self.args.should_save",
        "(rank == 0 if args.quiet else step)",
    ],
)
def test_a_condition_on_the_rank_is_known_however_it_is_spelled(condition):
    assert [rule for rule, _ in rules_in(within(f"if {condition}:\n    dist.barrier()"))] == ["rank-0-collective"]


@pytest.mark.parametrize(
    "body",
    [
        "if step:\n    pass\nelif rank == 0:\n    pass\nelse:\n    dist.barrier()",
        "rank == 0 and dist.barrier()",
        "rank != 0 or dist.barrier()",
        "y = dist.barrier() if rank == 0 else None",
        "while rank == 0:\n    dist.barrier()",
        "match rank:\n    case 0 | 1 if step:\n        pass\n    case 0:\n        dist.barrier()",
        "match rank:\n    case 0:\n        pass\n    case _:\n        dist.barrier()",
        "def leader():\n    return dist.get_rank() == 0\n\nif leader():\n    dist.barrier()",
        "def leader():\n    if not dist.is_initialized():\n        return True\n    return rank == 0\n\n"
        "if not leader():\n    dist.barrier()",
        "def mine():\n    return dist.get_rank()\n\nif mine() == 0:\n    dist.barrier()",
        "for x in loader:\n    if step:\n        with quiet():\n            if rank == 0:\n                continue\n"
        "    dist.barrier()",
        "class Lab:\n    def __init__(self):\n        self.speaks = rank == 0\n\n    def run(self):\n"
        "        if self.speaks:\n            dist.barrier()",
    ],
)
def test_the_ranks_that_reach_a_line_are_known_in_every_kind_of_branch(body):
    assert [rule for rule, _ in rules_in(within(body))] == ["rank-0-collective"]


@pytest.mark.parametrize("leaving", ["return", "sys.exit()", "sys.exit(0)", "exit()", "raise SystemExit"])
def test_ranks_that_have_left_are_missing_to_what_follows(leaving):
    body = f"import sys\n\ndef main():\n    if rank != 0:\n        {leaving}\n    dist.barrier()\n\nmain()"

    assert [rule for rule, _ in rules_in(within(body))] == ["rank-0-collective"]


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.zeros(3, device='cuda:0')",
        "torch.set_default_device('cuda:0')",
        "model.load_state_dict(torch.load('x.pt', map_location='cuda:0', weights_only=True))",
    ],
)
def test_device_0_is_found_wherever_a_device_is_said(line):
    assert [rule for rule, _ in rules_in(within(line))] == ["device-zero"]


def test_a_loader_that_is_neither_shuffled_nor_named_so_is_known_by_the_training_on_it():
    loop = "for i, x in enumerate(loader):\n    model(x).backward()"

    def found_in(body):
        return [rule for rule, _ in rules_in(within(body))]

    assert found_in(f"loader = DataLoader(dataset, batch_size=8)\n{loop}") == ["no-distributed-sampler"]
    assert found_in("loader = DataLoader(dataset, batch_size=8)\nfor x in loader:\n    print(model(x))") == []
    assert found_in(f"loader = DataLoader(share_of(dataset, rank), batch_size=8)\n{loop}") == []


def test_arguments_of_a_loader_are_known_by_their_place():
    assert [rule for rule, _ in rules_in(within("loader = DataLoader(dataset, 32, True)"))] == [
        "no-distributed-sampler"
    ]
    body = "sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, 32, True, sampler=sampler)"
    assert [rule for rule, _ in rules_in(within(body))] == ["shuffle-with-sampler"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1e-5 * 2", 2e-5),
        ("-RATE", -3e-4),
        ("float('2e-5')", 2e-5),
        ("not True", False),
        ("SHUFFLE and RATE > 1e-4", True),
        ("None or 'cuda'", "cuda"),
        ("1 if SHUFFLE else unknown", 1),
        ("self.training", True),
        ("torch.bfloat16 if SHUFFLE else torch.float16", "torch.bfloat16"),
        ("torch.bfloat16 if args.half else torch.float16", UNKNOWN),
        ("'a' * 1_000_000_000", UNKNOWN),
        ("1 / 0", UNKNOWN),
        ("not args.quiet", UNKNOWN),
        ("counter", UNKNOWN),
        ("args.lr", UNKNOWN),
    ],
)
def test_an_expression_has_a_value_if_the_text_tells_which(expression, value):
    tree = Tree(f"import torch\nRATE = 3e-4\nSHUFFLE = True\ncounter = 0\ncounter += 1\nx = {expression}")

    assert tree.value(tree.assigns[-1][1]) is value or tree.value(tree.assigns[-1][1]) == value


def test_an_option_has_its_default_only_where_a_rule_asks_for_it():
    options = "p.add_argument('-r', '--lr-max', default=2e-5)\np.add_argument('--all', action='store_true')\n"
    tree = Tree(f"{options}args.lr_max\nnot args.all")
    rate, flag = (node.value for node in tree.module.body[-2:])

    assert (tree.value(rate), tree.default(rate)) == (UNKNOWN, 2e-5)
    assert (tree.value(flag), tree.default(flag)) == (UNKNOWN, True)
    loader = "loader = DataLoader(dataset, shuffle=not args.keep)"
    option = "parser.add_argument('--keep', action='store_true')\n"
    assert [rule for rule, _ in rules_in(within(option + loader))] == ["no-distributed-sampler"]
    assert rules_in(within(loader)) == []


def test_a_second_gradient_in_training_is_one_however_it_is_asked_for():
    line = "slope = torch.autograd.grad(loss, x, create_graph=self.training)"

    assert [rule for rule, _ in rules_in(within(line, FSDP2_MODEL))] == ["double-backward-sharded"]


def test_a_model_cast_to_bf16_on_a_t4_is_found():
    assert [rule for rule, _ in rules_in("# for two T4s: T4 x2\nimport torch\nmodel = model.bfloat16()\n")] == [
        "bf16-on-t4"
    ]


def test_a_wrapped_model_is_known_by_its_name_in_other_functions_and_by_what_a_function_makes_of_it():
    body = "def show(model):\n    return model(x)\n\nif rank == 0:\n    show(model)"

    assert [rule for rule, _ in rules_in(within(body, FSDP2_MODEL))] == ["rank-0-evaluation"]
    own = "def show():\n    model = Net()\n    return model(x)\n\nif rank == 0:\n    show()"
    assert rules_in(within(own, FSDP2_MODEL)) == []


def test_a_test_may_be_slow():
    (mistaken, _), *_ = SEEDED["one-shard-unit"]

    assert rules_in("import pytest\n" + mistaken) == []


def test_frameworks_that_do_it_for_the_script_are_not_told_to():
    body = "train_loader = DataLoader(dataset, shuffle=True)"

    assert rules_in(within(body))
    assert rules_in("from accelerate import Accelerator\n" + within(body)) == []


@pytest.mark.parametrize("page", ["page.md", "page.txt"])
def test_the_blocks_of_a_page_are_checked_with_the_pages_lines(page, tmp_path):
    file = tmp_path / page
    file.write_text(
        "# DDP\n\n```python\nmodel = DDP(model)\n```\n\n```bash\nmodel = FSDP(\n```\n\n- as here:\n\n"
        "  ```python\n  dist.init_process_group(device_id=local_rank)\n  ```\n\n```python\n1. no Python\n```\n"
    )

    assert [(f.rule, f.line) for f in check(file)] == [("device-id-int", 14)]


def test_a_fragment_knows_what_the_rest_of_the_page_wraps(tmp_path):
    file = tmp_path / "page.md"
    blocks = ["model = FSDP(model, auto_wrap_policy=p)", "if rank == 0:\n    evaluate(model, test_loader)"]
    file.write_text("\n".join(f"```python\n{block}\n```" for block in blocks))

    assert [(f.rule, f.line) for f in check(file)] == [("rank-0-evaluation", 6)]
    file.write_text(f"```python\n{blocks[1]}\n```")
    assert not check(file)


def test_a_notebook_is_checked_by_cell_and_its_written_files_on_their_own(tmp_path):
    cells = [
        "%matplotlib inline\n!nvidia-smi",
        f"%%writefile train.py\n{BARRIER}",
        "import labkit\nlabkit?",
        "%%bash\nls (",
    ]
    file = tmp_path / "lab.ipynb"
    notebook = {"cells": [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells], "metadata": {}}
    file.write_text(json.dumps(notebook))

    (finding,) = check(file)

    assert (finding.rule, finding.cell, finding.line) == ("rank-0-collective", 2, LINE + 1)
    assert finding.place == f"{file}:cell 2:{LINE + 1}"
    assert "<a " not in check(file)._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("cell", "note"),
    [
        ("files = !ls", ""),
        ("%time train()", ""),
        ("print('%d'\n      % 3)", ""),
        ("def half(:", " (cell 1 is not Python)"),
    ],
)
def test_no_cell_keeps_the_others_from_being_checked(cell, note, tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (cell, "%%time\n" + BARRIER)])
    nbformat.write(book, tmp_path / "lab.ipynb")
    found = check(tmp_path / "lab.ipynb")

    assert [(f.rule, f.cell, f.line) for f in found] == [("rank-0-collective", 2, LINE + 1)]
    assert found.summary.endswith("1 finding (1 hangs)" + note.replace(" (", "; ").replace(")", ""))
    book.cells.pop()
    nbformat.write(book, tmp_path / "lab.ipynb")
    assert check(tmp_path / "lab.ipynb").summary.endswith("no findings" + note)


@pytest.mark.parametrize(
    "cell",
    [
        "%%time\n{}",
        "files = !ls\n{}",
        "%cd /tmp\n{}",
        "x = f(1,  # enough?\n      2)\n{}",
        "x = (7\n     % 2)\n{}",
        "{}\nmodel?\n?model",
        "s = '\x0b \u2028'\n{}",
    ],
)
def test_what_only_ipython_understands_does_not_hide_the_rest_of_a_notebook(cell, tmp_path):
    cells = ["this is no Python", "%%bash\nls (", cell.format("precision = torch.bfloat16  # on a T4")]
    file = tmp_path / "lab.ipynb"
    file.write_text(json.dumps({"cells": [{"cell_type": "code", "source": each} for each in cells]}))

    (found,) = check(file)
    line = next(i for i, text in enumerate(cells[2].split("\n"), 1) if "bfloat16" in text)
    assert (found.rule, found.cell, found.line) == ("bf16-on-t4", 3, line)
    file.write_text(json.dumps({"cells": [{"cell_type": "code", "source": each} for each in cells[:2]]}))
    assert repr(check(file)).endswith("no findings (cell 1 is not Python)")


def test_a_kaggle_notebook_says_that_it_runs_on_t4s(tmp_path):
    file = tmp_path / "lab.ipynb"
    code = {"cell_type": "code", "source": "import torch\nprecision = torch.bfloat16"}
    file.write_text(json.dumps({"cells": [code], "metadata": {"kaggle": {"accelerator": "nvidiaTeslaT4"}}}))

    assert [(f.rule, f.cell, f.line) for f in check(file)] == [("bf16-on-t4", 1, 2)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("broken.py", b"def f(:\n", r"broken.py is not Python: line 1: "),
        ("nul.py", b"x = 1\0\n", r"nul.py is not Python"),
        ("latin.py", b"# \xe9\n", r"latin.py cannot be decoded: .*Save it as UTF-8"),
        ("claims.py", b"# coding: klingon\n", r"claims.py cannot be decoded: unknown encoding: klingon"),
        ("deep.py", b"x = " + b"(" * 5000 + b")" * 5000, r"deep.py is not Python"),
        ("lab.ipynb", b"{}", r"lab.ipynb is not a notebook"),
        ("list.ipynb", b"[" * 100_000, r"list.ipynb is not a notebook"),
    ],
)
def test_what_is_not_python_is_refused_in_one_sentence(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ScriptError, match=says) as refused:
        check(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("given", [None, 3, "nope", "no/such/file.py", "x = 1\ny = 2\n", "a\0b.py", Path("/")])
def test_what_is_no_script_is_refused(given):
    with pytest.raises(ScriptError):
        check(given)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"\xef\xbb\xbfx = 1\n",
        b"# coding: latin-1\nx = '\xe9'\n",
        b"x = 1\r\ny = 2\r\n",
        b"x = '\\f'\n\x0cy = 1",
    ],
)
def test_odd_files_are_read(content, tmp_path):
    (tmp_path / "odd.py").write_bytes(content)

    assert not check(tmp_path / "odd.py")


def test_lines_are_counted_as_editors_do(tmp_path):
    (tmp_path / "crlf.py").write_bytes(("x = '\x0b \u2028'\n" + BARRIER).replace("\n", "\r\n").encode())

    assert [finding.line for finding in check(tmp_path / "crlf.py")] == [LINE + 1]


# What scripts are made of, in any order: nothing of it may make a rule fail.
ATOMS = sorted(
    {line.split("  # HERE")[0] for pairs in SEEDED.values() for pair in pairs for t in pair for line in t.split("\n")}
)


@given(st.lists(st.sampled_from(ATOMS), max_size=30))
def test_no_order_of_lines_breaks_a_rule(lines):
    text = "\n".join(lines)
    try:
        ast.parse(text)
    except SyntaxError:
        with pytest.raises(ScriptError):
            check(Script.parse(text))
    else:
        assert {finding.rule for finding in check(Script.parse(text))} <= set(RULES)


@given(st.text(max_size=200))
def test_any_text_is_checked_or_refused(text):
    try:
        check(Script.parse(text))
    except ScriptError as refused:
        assert "\n" not in str(refused)


def test_a_very_long_script_takes_seconds_at_most():
    text = str(Script.load("hybrid")) * 15  # 13,000 lines
    started = time.perf_counter()

    check(Script.parse(text))

    assert time.perf_counter() - started < 10  # one second where nothing else runs


def test_findings_show_themselves_as_lines_and_as_a_list_that_links_to_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a b.py"
    file.write_text(BARRIER.replace("# HERE", "# <script>"))

    found = check(file)
    bundle = found._repr_mimebundle_()

    first, why, fix, summary = repr(found).splitlines()
    assert first.startswith(f"{file}:{LINE}: hangs: rank-0-collective: `barrier` needs all ranks")
    assert (why[:9], fix[:9]) == ("    why: ", "    fix: ")
    assert summary == f"{file}: 1 finding (1 hangs)"
    assert bundle["text/plain"] == repr(found)
    assert f'href="a%20b.py#line={LINE - 1}"' in bundle["text/html"]
    assert "<script>" not in bundle["text/html"]
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert f'href="../a%20b.py#line={LINE - 1}"' in check(file).html()
    assert found.records()[0]["line"] == found[0].line == LINE
    assert repr(check("ddp")) == "ddp.py: no findings"


def test_a_migration_says_what_changed_and_what_was_forgotten():
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\ntorch.save(x, 'x.pt')"
    before = Script.parse(within(clips), name="before")
    after = Script.parse(within(clips, FSDP1_MODEL), name="after")

    migration = check(before, after)

    assert [(c.what, c.before, c.after) for c in migration.changed][:2] == [
        ("wrapper", "DDP", "FSDP1"),
        ("units that are sharded", "", "auto_wrap_policy"),
    ]
    assert [finding.rule for finding in migration.forgotten] == ["clip-of-shards"]
    assert [finding.rule for finding in migration.kept] == ["save-on-every-rank"]
    assert "wrapper: DDP (line 15) -> FSDP1 (line 15)" in repr(migration)
    assert "clip-of-shards" in migration._repr_mimebundle_()["text/html"]
    assert json.dumps(migration.record())


def test_a_mistake_that_is_made_once_more_is_a_new_one():
    old, new = "torch.save(x, 'x.pt')", "torch.save(y, 'y.pt')"
    migration = check(Script.parse(within(old)), Script.parse(within(f"{new}\n{old}", FSDP1_MODEL)))

    assert [finding.code for finding in migration.forgotten] == [new]
    assert [finding.code for finding in migration.kept] == [old]
    renamed = check(Script.parse(within(old)), Script.parse(within(new, FSDP1_MODEL)))
    assert [finding.code for finding in renamed.kept] == [new]
    assert not renamed.forgotten


def test_our_own_migration_forgets_nothing():
    migration = check("ddp", "fsdp")

    assert not migration.forgotten
    assert migration.changed
    assert not check("ddp", "ddp").changed


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(BARRIER)
    Path("good.py").write_text(CORRECTED)
    Path("broken.py").write_text("def f(:\n")
    return tmp_path


def test_the_terminal_says_by_its_exit_code_whether_something_was_found(in_folder, capsys):
    assert main(["check", "good.py", "ddp"]) == 0
    assert capsys.readouterr().out == "good.py: no findings\nddp.py: no findings\n"
    assert main(["check", "good.py", "bad.py"]) == 1
    assert f"bad.py:{LINE}: hangs: rank-0-collective: " in capsys.readouterr().out
    assert main(["check", "broken.py", "bad.py"]) == 2  # and the other is checked all the same
    out, err = capsys.readouterr()
    assert "bad.py: 1 finding" in out
    assert err == "labkit: broken.py is not Python: line 1: invalid syntax\n"


def test_the_terminal_prints_json(in_folder, capsys):
    assert main(["check", "--json", "bad.py", "good.py"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["file"], record["line"], record["rule"]) == ("bad.py", LINE, "rank-0-collective")


def test_the_terminal_explains_a_migration(in_folder, capsys):
    assert main(["check", "--from", "good.py", "bad.py"]) == 1
    assert "rank-0-collective" in capsys.readouterr().out
    assert main(["check", "--from", "ddp", "fsdp"]) == 0
    assert "wrapper: DDP" in capsys.readouterr().out
    assert main(["check", "--json", "--from", "ddp", "fsdp"]) == 0
    assert json.loads(capsys.readouterr().out)["forgotten"] == []
    assert main(["check", "--from", "ddp", "fsdp", "fsdp1"]) == 2


def test_a_folder_and_standard_input_are_checked(in_folder, monkeypatch, capsys):
    for name in ("bad.py", "broken.py"):
        Path(name).unlink()
    for place in ("src/models", "build", "env", ".git"):
        (in_folder / place).mkdir(parents=True)
        (in_folder / place / "train.py").write_text(BARRIER)
    (in_folder / "env" / "pyvenv.cfg").touch()

    assert main(["check", "."]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"src/models/train.py:{LINE}: hangs") and said.count("rank-0-collective") == 1
    assert said.endswith("2 files checked, 1 without findings\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(BARRIER))
    assert main(["check", "-"]) == 1
    assert "stdin.py: 1 finding" in capsys.readouterr().out


def test_checking_imports_no_torch(in_folder):
    code = "import sys, labkit; labkit.check('bad.py'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    code = "import sys; from labkit.cli import main; main(['check', 'bad.py']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nFalse\n")


def test_the_pre_commit_hook_is_a_command_that_takes_files(in_folder):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())

    verb = hook["entry"].split()
    assert verb[0] == "labkit"
    assert set(hook["types_or"]) == {"python", "jupyter"}
    command = [sys.executable, "-m", "labkit.cli", *verb[1:]]
    assert subprocess.run([*command, "good.py"], capture_output=True).returncode == 0
    assert subprocess.run([*command, "good.py", "bad.py"], capture_output=True).returncode == 1


def test_before_a_launch_a_script_of_ones_own_is_warned_of_in_a_few_lines(in_folder, capsys):
    mistakes = ["if rank == 0:", *["    dist.barrier()"] * 3, "x = x.to('cuda:0')", "loss = loss / world_size"]
    Path("worse.py").write_text(within("\n".join([*mistakes, "loss.backward()", "torch.save(x, 'x.pt')"])))

    warn("bad.py")
    first, more = capsys.readouterr().err.splitlines()
    assert first.startswith(f"bad.py:{LINE}: hangs: rank-0-collective")
    assert more == "labkit check bad.py explains why and the fix"
    warn("worse.py")
    first, *lines, more = capsys.readouterr().err.splitlines()
    assert first.startswith("worse.py:18: hangs: rank-0-collective")
    assert first.endswith(" (and 2 more)")
    assert [line.split(": ")[2] for line in lines] == ["device-zero", "averaged-twice", "save-on-every-rank"]
    assert more == "labkit check worse.py explains why and the fix"
    warn(Script.parse(BARRIER, name="ddp"))
    assert "labkit.check(script)" in capsys.readouterr().err


def test_before_a_launch_the_same_text_is_warned_of_once(in_folder, capsys):
    warn("bad.py")
    assert "rank-0-collective" in capsys.readouterr().err
    warn(in_folder / "bad.py")
    assert capsys.readouterr().err == ""
    Path("bad.py").write_text(BARRIER + "x = 1\n")
    warn("bad.py")
    assert "rank-0-collective" in capsys.readouterr().err


def test_at_most_five_rules_are_warned_of_and_those_that_hang_first(in_folder, monkeypatch, capsys):
    monkeypatch.setattr("labkit.checking.checker.MOST_LINES", 1)
    Path("worse.py").write_text(within("torch.save(x, 'x.pt')\nif rank == 0:\n    dist.barrier()"))

    warn("worse.py")

    first, last = capsys.readouterr().err.splitlines()
    assert "rank-0-collective" in first
    assert last == "1 more; labkit check worse.py explains why and the fix"


def test_in_a_notebook_the_warning_names_what_to_type_there(in_folder):
    cell = nbformat.v4.new_code_cell("from labkit.checking import warn\nwarn('bad.py')\nwarn('bad.py')")
    book = nbformat.v4.new_notebook(cells=[cell])

    NotebookClient(book, kernel_name="python3").execute()

    (output,) = book.cells[0].outputs
    first, more = output.text.splitlines()
    assert output.name == "stderr"
    assert first.startswith(f"bad.py:{LINE}: hangs: rank-0-collective: ")
    assert more == "labkit.check('bad.py') explains why and the fix"


SPAWN = """
import torch.multiprocessing as mp

def train(rank):
    pass

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""
SPAWNED_WORKERS = """
from torch.utils.data import DataLoader

loader = DataLoader(range(8), num_workers=1, multiprocessing_context="spawn")
"""


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (SPAWN, 8, "mp.spawn starts ranks, but torchrun has already started them"),
        (SPAWNED_WORKERS, 4, 'put the main code under `if __name__ == "__main__":`'),
        ("import torch.multiprocessing as mp\n\nmp.set_start_method('spawn')\n", 3, "every spawned worker process"),
    ],
)
def test_before_a_launch_processes_of_the_scripts_own_are_named(text, line, message, in_folder, capsys):
    Path("mine.py").write_text(text)

    warn("mine.py")

    assert re.search(rf"^mine.py:{line}: .*{re.escape(message)}", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("script", ["ddp", "good.py", "nope", "no.py", None, "broken.py", "slow.py"])
def test_before_a_launch_nothing_else_is_said(script, in_folder, capsys):
    Path("slow.py").write_text(SEEDED["item-every-step"][0][0])

    warn(script)
    warn(Script.load("ddp"))

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("old", "new"), REPLACED.items())
def test_every_successor_is_in_the_installed_torch(old, new):
    successors = re.findall(r"torch(?:\.\w+)+", new)

    assert successors
    for name in successors:
        assert pkgutil.resolve_name(name)


def test_a_model_of_fully_shard_has_none_of_what_rules_say_it_has_not():
    from torch.distributed.fsdp import FSDPModule

    assert not {"module", "no_sync", "clip_grad_norm_"} & set(dir(FSDPModule))


def test_a_failure_of_the_checker_never_stops_a_launch(in_folder, monkeypatch, capsys):
    monkeypatch.setattr("labkit.checking.checker.check", lambda script: 1 / 0)

    warn("bad.py")

    assert capsys.readouterr() == ("", "")


def test_launching_warns_before_anything_starts(in_folder, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise labkit.LaunchError("refused")

    monkeypatch.setattr("labkit.launching.start_run", refuse)

    with pytest.raises(labkit.LaunchError):
        labkit.launch("bad.py", nproc_per_node=2)
    assert f"bad.py:{LINE}: hangs: rank-0-collective" in capsys.readouterr().err


def test_the_seeded_scripts_are_otherwise_clean():
    assert rules_in(within("")) == rules_in(within("", FSDP1_MODEL)) == rules_in(within("", FSDP2_MODEL)) == []
    assert DDP_MODEL in within("")


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (
            "for x in loader:\n    model.module(x).backward()\n    for p in model.parameters():\n"
            "        dist.all_reduce(p.grad)",
            DDP_MODEL,
        ),
        (
            "scaler.scale(loss).backward()\nnn.utils.clip_grad_norm_(model.parameters(), scaler.get_scale())",
            DDP_MODEL,
        ),
        (
            "scaler = torch.amp.GradScaler('cuda')\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            FSDP1_MODEL.replace("policy)", "policy, process_group=own)"),
        ),
        ("for name, p in net.named_parameters():\n    if 'head' in name:\n        p.requires_grad = True", DDP_MODEL),
        (
            "if rank == 0:\n    own = model.state_dict()\n    model.load_state_dict(average)\n    evaluate()\n"
            f"    model.load_state_dict(own)\n{LOOP}",
            DDP_MODEL,
        ),
        (f"model.module.body.requires_grad_(False)\nmodel.module.body.requires_grad_(True)\n{LOOP}", DDP_MODEL),
        (
            "class One(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.weight = nn.Linear(8, 8)\n\nlayer = make()\nlayer.weight.requires_grad = False",
            DDP_MODEL,
        ),
        (f"teacher.body.requires_grad_(False)\nteacher.head = nn.Linear(8, 2)\n{LOOP}", DDP_MODEL),
    ],
)
def test_what_is_done_by_hand_or_undone_is_passed_over(body, model):
    assert rules_in(within(body, model)) == []


LERP = "self.mean.lerp_(h.detach().mean(0), 0.1)"
MEAN = f"h = h - self.mean\n{LERP}"
FILLED = "if not self.ready:\n    self.scale.data = h.detach().std(0)\n    self.ready = True\nh = h * self.scale"


@pytest.mark.parametrize(
    "script",
    [
        writing(
            buffer("mean"), MEAN, before="def common():\n    for b in model.buffers():\n        dist.all_reduce(b)\n\n"
        ),
        writing(buffer("mean"), f"{MEAN}\nsync_buffers(self)"),
        writing(buffer("mean"), f"{MEAN}\nprint(self.mean)", before="def common():\n    average(model.mean)\n\n"),
        writing(buffer("mean"), MEAN, DDP_MODEL.replace("to(device)", "to(device), process_group=own")),
        writing(buffer("mean"), f"{LERP}\nh = h - (h.mean(0) if self.training else self.mean)"),
        writing(buffer("mean"), f"if self.training:\n    {LERP}\nelse:\n    h = h - self.mean"),
        writing(buffer("mean"), "self.mean.copy_(h.detach().mean(0))\nh = h - self.mean"),
        writing(buffer("mean"), f"h = self.given(h)\n{MEAN}").replace("h = self.first(x)", "h = 0"),
        writing(buffer("mean"), f"if self.frozen:\n    return self.last(h)\n{MEAN}"),
        writing(buffer("usage"), "self.usage += h.detach().sum(0)\nreturn self.last(h), (self.usage / 9).std()"),
        writing(buffer("usage"), "self.usage += h.detach().sum(0)\nspread = (h - self.usage).std()"),
        writing(buffer("usage"), "self.usage += h.detach().sum(0)\nh = h + torch.zeros(3, device=self.usage.device)"),
        writing(buffer("state"), "self.state.copy_(h.detach())\nh = h + self.state"),
        writing(buffer("state"), "h = h * self.state.shape[0]\nself.state.copy_(h.detach())\nh = h + self.state"),
        writing(TEACHER, follows("t.lerp_(s, 0.1)"), FSDP_NET.replace("model.blocks", "model.modules()")),
        writing(TEACHER, follows("t.lerp_(s, 0.1)"), FSDP1_MODEL.replace("net", "Net()")),
        writing(TEACHER, follows("t = t.lerp(s, 0.1)"), FSDP_NET),
        writing(TEACHER, follows("t.requires_grad_(False)"), FSDP_NET),
        writing(
            TEACHER,
            follows("t.lerp_(s, 0.1)"),
            "from functools import partial\nshard = partial(fully_shard, ignored_params=own)\n" + FSDP_NET,
        ),
        writing(
            "self.scale, self.ready = nn.Parameter(torch.ones(32)), False",
            FILLED,
            DDP_MODEL.replace("Net().to(device)", "net"),
            before="net = Net()\nnet.load_state_dict(state)\n",
        ),
    ],
)
def test_what_a_forward_writes_is_passed_over_unless_several_ranks_surely_make_something_else_of_it(script):
    assert rules_in(script) == []


@pytest.mark.parametrize(
    "script",
    [
        writing(buffer("mean"), f"if not self.training:\n    return h\n{MEAN}"),
        writing(buffer("mean"), MEAN, before="def mean_of(values):\n    return values.mean()\n\n\n"),
        writing(buffer("mean"), f"{MEAN}\nself.count += 1").replace(LERP, f"if self.count > 9:\n            {LERP}"),
        writing(buffer("mean"), MEAN.replace("h.detach()", "keys")).replace(
            "h = self.first(x)", "h = self.first(keys)"
        ),
        writing(buffer("mean"), MEAN, before="def main(net):\n    model = DDP(net)\n\n\n", model="main(Net())\n"),
        writing(
            buffer("mean"), "h = h - self.mean\nself.sum.add_(h.detach().sum(0))\nself.mean.copy_(self.sum / 9)"
        ).replace(
            "def forward", 'def setup(self):\n        self.register_buffer("sum", torch.zeros(32))\n\n    def forward'
        ),
    ],
)
def test_what_a_forward_writes_is_found_whatever_else_a_script_does(script):
    assert [rule for rule, _ in rules_in(script)] == ["forward-writes"]


def test_what_is_divided_before_the_ranks_start_is_the_same_on_all():
    text = (
        "import random\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n\n\n"
        "def run(rank, parts):\n    dist.init_process_group(rank=rank)\n    dist.destroy_process_group()\n\n\n"
        "def main(rows):\n    random.shuffle(rows)\n    {}\n\n\nmain(list(range(10)))\n"
    )
    own = text.format("parts = rows[:9], rows[9:]")

    assert rules_in(own) == [("split-seeded-by-rank", 12)]
    assert rules_in(own.replace("rows[9:]\n", "rows[9:]\n    mp.spawn(run, (parts,))\n")) == []


def test_ranks_that_make_the_same_call_in_different_functions_answer_each_other():
    functions = "def first():\n    dist.all_reduce(x)\n\n\ndef second():\n    dist.{}(x)\n\n\n"
    text = f"import torch.distributed as dist\n\n{functions}if rank == 0:\n    first()\nelse:\n    second()\n"

    assert rules_in(text.format("all_reduce")) == []
    assert {slug for slug, _ in rules_in(text.format("broadcast"))} == {"rank-0-collective"}


def test_collectives_are_those_of_the_installed_torch_with_the_place_of_their_group():
    import torch.distributed
    from torch.distributed import _functional_collectives as functional

    for name, place in COLLECTIVES.items():
        collective = getattr(torch.distributed, name, None) or getattr(functional, name)
        parameters = [*inspect.signature(collective).parameters]
        assert place is None or parameters[place] == "group", name


def test_the_witness_observes_the_collectives_that_rules_know():
    """Apart from those that older versions of torch lack, and the barrier that is for debugging."""
    newer = {"all_gather_single", "all_gather_tensor", "reduce_scatter_single"}
    known = {name for name, place in COLLECTIVES.items() if place is not None}

    assert set(joined.COLLECTIVES) == known - newer - {"monitored_barrier"}

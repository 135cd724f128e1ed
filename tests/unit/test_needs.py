"""What a program needs beside it: files that are there, what is missing, and no false alarms."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.errors import LabError
from labkit.needs import needs_of_notebook, needs_of_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project: a package, a module, scripts, and small data."""
    files = {
        "eval.py": "import nowhere",
        "helper.py": "import json\nfrom mymodel import Net\n",
        "mymodel/__init__.py": "from .net import Net\n",
        "mymodel/net.py": "from . import layers\nfrom .layers import Layer\n",
        "mymodel/layers.py": "Layer = 1\n",
        "mymodel/registered.py": "",
        "mymodel/tests/test_net.py": "import nothing_of_the_kind\n",
        "plain/parts.py": "",
        "train.py": "import helper\nCONFIG = open('config.yaml').read()\n",
        "sub/train.py": "import beside\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
        "print((HERE / 'vocab.txt').read_text(), (HERE.parent / 'data.csv').read_text())\n",
        "sub/beside.py": "",
        "sub/vocab.txt": "a b",
        "run.sh": "torchrun --nproc-per-node 2 \\\n  train.py --config config.yaml\n",
        "uses_beside.py": "import beside",
        "app/__main__.py": "import part",
        "app/part.py": "",
        "other.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": ["open('data.csv')"]}]}),
        "with_data/__init__.py": "",
        "with_data/load.py": "from importlib.resources import files\nfiles(__package__).joinpath('words.json')",
        "with_data/words.json": "{}",
        "config.yaml": "lr: 1",
        "data.csv": "x,y\n1,2\n",
        "data/a.csv": "1",
        "data/b.csv": "2",
        "data/c.txt": "3",
        "weights.pt": "w",
        "old.csv": "of an earlier run",
        "runs/20260101/run.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


PACKAGE = ["mymodel/__init__.py", "mymodel/layers.py", "mymodel/net.py", "mymodel/registered.py"]
PACKAGE += ["mymodel/tests/test_net.py"]  # all of a package: a registry may import what no text names
TRAIN = ["config.yaml", "helper.py", *PACKAGE, "train.py"]


@pytest.mark.parametrize(
    ("cell", "needed"),
    [
        ("import torch, os, labkit, numpy as np", []),
        ("import helper", ["helper.py", *PACKAGE]),
        ("from mymodel.net import Net", PACKAGE),
        ("import plain.parts", ["plain/parts.py"]),
        ("import importlib\nimportlib.import_module('helper')", ["helper.py", *PACKAGE]),
        ("labkit.launch('train.py', nproc_per_node=2)", TRAIN),
        ("SCRIPT = 'train.py'\nlabkit.check(SCRIPT)", TRAIN),
        ("!torchrun --nproc-per-node=2 train.py --epochs 3", TRAIN),
        ("!torchrun --nproc-per-node 2 \\\n  train.py", TRAIN),
        ("out = !python train.py", TRAIN),
        ("%run train.py", TRAIN),
        ("%%bash\ncd .\nbash run.sh", ["run.sh", *TRAIN]),
        ("!python -m mymodel.net", PACKAGE),
        ("import subprocess, sys\nsubprocess.run([sys.executable, 'train.py', f'--x={1}'])", TRAIN),
        ("import os\nos.system('python train.py')", TRAIN),
        ("labkit.launch('sub/train.py')", ["data.csv", "sub/beside.py", "sub/train.py", "sub/vocab.txt"]),
        ("open('data.csv')", ["data.csv"]),
        ("import pandas as pd\nFILE = 'data.csv'\ndf = pd.read_csv(FILE)", ["data.csv"]),
        ("from pathlib import Path\nDATA = Path('data')\nx = np.loadtxt(DATA / 'a.csv')", ["data/a.csv"]),
        ("import os\nx = open(os.path.join('data', 'b.csv'))", ["data/b.csv"]),
        ("NAME = 'a'\nx = open(f'data/{NAME}.csv')", ["data/a.csv"]),
        ("def load(path='data.csv'):\n    return open(path)", ["data.csv"]),
        ("torch.load('weights.pt', weights_only=True)", ["weights.pt"]),
        ("labkit.launch('ddp', args=['--config', 'config.yaml'])", ["config.yaml"]),
        ("labkit.launch('ddp', args=['--config=config.yaml'])", ["config.yaml"]),
        ("my_loader({'train': 'data.csv'})", ["data.csv"]),
        ("for name in Path('data').glob('*.csv'): print(name)", ["data/a.csv", "data/b.csv"]),
        ("import glob\nglob.glob('data/*.csv')", ["data/a.csv", "data/b.csv"]),
        ("from glob import glob\nfor name in sorted(glob('data/*.csv')): print(name)", ["data/a.csv", "data/b.csv"]),
        ("!torchrun -m plain.parts --data-dir data", ["data/a.csv", "data/b.csv", "data/c.txt", "plain/parts.py"]),
        ("labkit.launch('ddp', args=['--data-dir', 'data'])", ["data/a.csv", "data/b.csv", "data/c.txt"]),
        ("parser.add_argument('--data-dir', default='data')", ["data/a.csv", "data/b.csv", "data/c.txt"]),
        # in another folder
        ("!cd sub && torchrun beside.py > ../log.txt", ["sub/beside.py"]),
        ("%cd sub\n!torchrun beside.py", ["sub/beside.py"]),
        ("import os\nos.chdir('sub')\nopen('vocab.txt')", ["sub/vocab.txt"]),
        ("!PYTHONPATH=sub python uses_beside.py", ["sub/beside.py", "uses_beside.py"]),
        ("%env PYTHONPATH=sub\n!python uses_beside.py", ["sub/beside.py", "uses_beside.py"]),
        ("os.environ['PYTHONPATH'] = 'sub'\n!python uses_beside.py", ["sub/beside.py", "uses_beside.py"]),
        ("labkit.launch('uses_beside.py', env={'PYTHONPATH': 'sub'})", ["sub/beside.py", "uses_beside.py"]),
        ("import sys\nsys.path += ['sub']\nimport beside", ["sub/beside.py"]),
        # other ways to start a program
        ("!bash -c 'python train.py'", TRAIN),
        ("import subprocess\nsubprocess.Popen(f'torchrun train.py --lr {lr}', shell=True)", TRAIN),
        ("labkit.launch(module='mymodel.net')", PACKAGE),
        ("labkit.launch('app')", ["app/__main__.py", "app/part.py"]),
        ("%run other.ipynb", ["data.csv", "other.ipynb"]),
        ("import with_data.load", ["with_data/__init__.py", "with_data/load.py", "with_data/words.json"]),
        ("ImageFolder('data')", ["data/a.csv", "data/b.csv", "data/c.txt"]),
        ("%%time\ndf = pd.read_csv('data.csv')", ["data.csv"]),
        ("if x:\n    import helper\n    open('config.yaml')", ["config.yaml", "helper.py", *PACKAGE]),
        # written by the program itself, or by what it uses
        ("df.to_csv('old.csv')\npd.read_csv('old.csv')", []),
        ("with open('old.csv', 'w') as f: f.write('x')\nopen('old.csv')", []),
        ("%%writefile old.csv\nx", []),
        ("open('runs/20260101/run.json')", []),
        # but what it reads first
        ("open('data.csv').read()\nopen('data.csv', 'w')", ["data.csv"]),
        ("MNIST(root='data', download=True)", []),
        ("open('/kaggle/input/x/data.csv')\nurlopen('https://a.org/data.csv')", []),
    ],
)
def test_what_a_notebook_needs_is_found(folder, cell, needed):
    needs = needs_of_notebook(["import labkit, torch, numpy as np, pandas as pd", cell], folder)

    assert sorted(file.name for file in needs.files) == sorted(needed)
    assert (needs.missing, needs.outside) == ((), ())
    for file in needs.files:
        assert (file.path, file.size) == (folder / file.name, (folder / file.name).stat().st_size)
        assert file.why


def test_a_file_comes_with_the_place_that_needs_it(folder):
    (first, *_) = needs_of_notebook(["x = 1", "x = 2\nopen('data.csv')"], folder).files
    assert (first.name, first.why, first.size) == ("data.csv", "cell 2, line 2", 8)


@pytest.mark.parametrize(
    ("cell", "missing"),
    [
        ("import nowhere.at_all", "nowhere (imported in cell 1, line 1)"),
        ("x = 1\nfrom nowhere import y", "nowhere (imported in cell 1, line 2)"),
        ("open('absent.csv')", "absent.csv (cell 1, line 1)"),
        ("FILE = 'data/absent.csv'\nx = 1\npd.read_csv(FILE)", "data/absent.csv (cell 1, line 3)"),
        ("Path('absent.txt').read_text()", "absent.txt (cell 1, line 1)"),
        ("def main():\n    return open('absent.csv')\n\n\nmain()", "absent.csv (cell 1, line 2)"),
        ("labkit.launch('absent.py')", "absent.py (cell 1, line 1)"),
        ("open('absent.csv')\n!python train.py\n%run train.py", "absent.csv (cell 1, line 1)"),
        ("labkit.launch('train.py')\nlabkit.launch('absent.py')", "absent.py (cell 1, line 2)"),
        ("!nvidia-smi\n!pip install x\nopen('absent.csv')", "absent.csv (cell 1, line 3)"),
        ("def main(rank):\n    open('absent.csv')\n\n\nmp.spawn(main, nprocs=2)", "absent.csv (cell 1, line 2)"),
        ("!torchrun absent.py", "absent.py (cell 1, line 1)"),
    ],
)
def test_what_is_missing_is_named_with_the_place_that_needs_it(folder, cell, missing):
    assert needs_of_notebook([cell], folder).missing == (missing,)
    assert needs_of_notebook([cell], folder, there=[missing.split()[0]]).missing == ()


def test_what_a_carried_module_lacks_is_missing_unless_only_its_functions_need_it(folder):
    (folder / "helper.py").write_text("import nowhere\n\n\ndef unused():\n    open('absent.csv')\n")
    needs = needs_of_notebook(["labkit.launch('train.py')"], folder)
    assert needs.missing == ("nowhere (imported in helper.py, line 1)",)


@pytest.mark.parametrize(
    "cell",
    [
        "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None",
        "if x:\n    import nowhere\n    open('absent.csv')",
        "def never_called():\n    open('absent.csv')",
        "def not_always_called():\n    open('absent.csv')\n\n\nif x:\n    not_always_called()",
        "if 'absent.csv' not in os.listdir():\n    download()\nopen('absent.csv')",
        "SCRIPT = 'eval.py'",
        "with contextlib.suppress(OSError):\n    open('absent.csv')",
        "x = open('absent.csv') if there else None",
        "!pip install nowhere\nimport nowhere",
        "%pip install --quiet nowhere\nimport nowhere",
        "sys.path.append(folder)\nimport nowhere",
        "!wget https://a.org/absent.csv\nopen('absent.csv')",
        "import os\nos.chdir(somewhere)\nopen('absent.csv')",
        "%cd elsewhere\nopen('absent.csv')",
        "np.save('absent', x)\nnp.load('absent.npy')",
        "make(into='absent')\nopen('absent/x.csv')",
        "download('absent')\nopen('absent/x.csv')",
        "df.to_csv('absent.csv')\nopen('absent.csv')",
        "urlretrieve(url, 'absent.csv')\nopen('absent.csv')",
        "for path in paths:\n    open(path)\n    open(path + 'x')\n    open(f'{path}/x')",
        "some.open('a')\nPath(x).open('a').read()\nzipfile.Path(y).open('r')",
        "print('absent.csv')\nargs = ['absent.csv']",
        "!cat {path}/absent.csv\n!python $SCRIPT",
        "open('../input/titanic/train.csv')\nopen('~/x')",
        "import kaggle_secrets\nfrom google.colab import drive",
        "open('data/*.csv')",
        "pd.read_csv('https://a.org/b.csv')\ntorch.load('s3://a/b.pt')",
        # made by what was run before
        "def load():\n    open('absent.csv')\n\n\n!python helper.py\nload()",
        "if x:\n    !python absent.py",
        "!torchrun helper.py --out absent.pt\ntorch.load('absent.pt')",
        "labkit.launch('ddp')\nopen('absent.csv')",
        "!labkit write ddp > absent.py\n!torchrun absent.py",
        "!some-tool\nopen('absent.csv')",
        "!python helper.py | tee absent.txt\nopen('absent.txt')",
        "import subprocess\nsubprocess.run(['some-tool'])\nopen('absent.csv')",
        "tarfile.open('x.tar', 'w')\ntarfile.open('x.tar').extractall()\nopen('absent/a.csv')",
        "%%writefile made/__init__.py\n",
        "Path('made.py').write_text('x = 1')",
        "%env PYTHONPATH=/some/folder\nimport nowhere",
        "os.environ['PYTHONPATH'] = folder\nimport nowhere",
        "from __future__ import annotations\nif TYPE_CHECKING:\n    import nowhere",
        "%%writefile made.py\nimport torch",
        "%%writefile {name}.py\nimport nowhere",
        "not python at all",
        "%%html\n<b>import nowhere</b>",
        "NAME = 'absent.csv'\nNAME = computed()\nopen(NAME)",
        "labkit.launch('ddp')\nlabkit.launch(script)\nlabkit.launch(module='a.b')",
    ],
)
def test_what_may_be_there_or_is_computed_is_no_alarm(folder, cell):
    needs = needs_of_notebook([cell, "import made" if "made" in cell else ""], folder)
    assert (needs.missing, needs.outside) == ((), ())


def test_a_module_that_a_cell_writes_needs_what_it_imports(folder):
    needs = needs_of_notebook(["%%writefile own.py\nimport helper", "import own"], folder)
    assert sorted(file.name for file in needs.files) == sorted(["helper.py", *PACKAGE])


def test_what_will_be_installed_is_not_missing_and_a_module_of_that_name_beside_comes_first(folder):
    needs = needs_of_notebook(["import nowhere, helper"], folder, installed=["nowhere", "helper"])
    assert needs.missing == ()
    assert "helper.py" in {file.name for file in needs.files}


@pytest.mark.parametrize(
    "cell", ["open('../data.csv')", "labkit.launch('../train.py')", "Path('..', 'data.csv').read_text()"]
)
def test_what_lies_outside_of_the_folder_is_named(folder, cell):
    (folder / "inner").mkdir()
    (outside,) = needs_of_notebook([cell], folder / "inner").outside
    assert outside.startswith("../") and outside.endswith("(cell 1, line 1)")
    assert needs_of_notebook([f"if x:\n    {cell}"], folder / "inner").outside == ()


def test_a_package_that_python_finds_elsewhere_is_put_beside_the_program(folder, tmp_path_factory, monkeypatch):
    """Of an installation as editable: it has no files where packages are installed."""
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "of_mine").mkdir()
    (checkout / "of_mine" / "__init__.py").write_text("from of_mine.x import y")
    (checkout / "of_mine" / "x.py").write_text("y = 1")
    monkeypatch.syspath_prepend(str(checkout))
    (folder / "sub" / "beside.py").write_text("import of_mine")

    needs = needs_of_notebook(["import of_mine", "labkit.launch('sub/train.py')"], folder)

    found = {file.name: file.path for file in needs.files if "of_mine" in file.name}
    expected = [f"{place}of_mine/{name}" for place in ("", "sub/") for name in ("__init__.py", "x.py")]
    assert sorted(found) == sorted(expected)
    assert found["sub/of_mine/x.py"] == found["of_mine/x.py"] == checkout / "of_mine" / "x.py"


def test_folders_that_a_program_adds_to_the_path_are_searched(folder):
    needs = needs_of_notebook(["import sys\nsys.path.append('sub')\nimport beside"], folder)
    assert [file.name for file in needs.files] == ["sub/beside.py"]


def test_what_a_script_needs_depends_on_where_it_lies_where_it_runs_and_its_arguments(folder):
    source = (folder / "sub" / "train.py").read_bytes()
    needs = needs_of_script(source, "train.py", folder, own=folder / "sub", args=["--config=config.yaml", "5"])

    assert sorted(file.name for file in needs.files) == ["config.yaml", "data.csv", "sub/beside.py", "sub/vocab.txt"]
    assert needs.size == sum((folder / file.name).stat().st_size for file in needs.files)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda path: path.stem)
def test_the_labs_bring_all_they_need(path):
    cells = json.loads(path.read_text())["cells"]
    needs = needs_of_notebook(
        ["".join(c["source"]) for c in cells if c["cell_type"] == "code"], path.parent, there=["timm"]
    )
    assert (needs.files, needs.missing, needs.outside) == ((), (), ())


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda path: path.stem)
def test_labkits_own_scripts_need_nothing(path):
    optional = ["transformers", "peft", "datasets", "torchao", "bitsandbytes", "schedulefree", "sklearn"]
    needs = needs_of_script(path.read_bytes(), path.name, path.parent.parent, there=optional)
    assert (needs.files, needs.missing, needs.outside) == ((), (), ())


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)  # root may read everything
    with pytest.raises(LabError, match=r"helper\.py is needed and cannot be read: Permission denied"):
        needs_of_notebook(["import helper"], folder)


def test_a_cell_writes_modules_and_scripts_in_a_folder_of_its_own(folder):
    cells = ["%%writefile made/model.py\nx = 1", "%%writefile made/train.py\nimport model, helper"]
    needs = needs_of_notebook([*cells, "!torchrun made/train.py"], folder)
    assert needs.missing == ()
    assert sorted(file.name for file in needs.files) == sorted(["helper.py", *PACKAGE])


def test_nothing_is_run_or_imported(folder):
    (folder / "helper.py").write_text("raise SystemExit('was run')")
    code = "from labkit.needs import needs_of_notebook as n; from pathlib import Path; "
    code += f"n(['import helper'], Path({str(folder)!r})); "
    code += "import sys; print('torch' in sys.modules, 'helper' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_package_of_ones_own_without_the_module_is_missed(folder):
    (folder / "own").mkdir()
    (folder / "own" / "__init__.py").touch()
    (folder / "own" / "here.py").write_text("from .gone import x\n")

    assert needs_of_notebook(["import own.here"], folder).missing == ("own.gone (imported in own/here.py, line 1)",)
    assert needs_of_notebook(["import own.away"], folder).missing == ("own.away (imported in cell 1, line 1)",)
    assert needs_of_notebook(["try:\n    import own.away\nexcept ImportError:\n    pass"], folder).missing == ()


def test_data_that_is_not_there_and_may_be_read_is_doubted(folder):
    reads = "from helper import load\nrows = load('rows_of_may.csv')"
    assert needs_of_notebook([reads], folder).unsure == ("rows_of_may.csv (cell 1, line 2)",)
    assert needs_of_notebook(["open('rows_of_may.csv', 'w').write('1')", reads], folder).unsure == ()
    assert needs_of_notebook(["%%writefile rows_of_may.csv\n1,2", reads], folder).unsure == ()

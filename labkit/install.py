"""Says how labkit, and whatever it needs, is installed: the only place that knows where labkit can be had.

The texts have the same commands: `python docs/install_texts.py` writes them from SOURCE.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from shutil import which

from labkit.version import __version__

# Modules that a package of another name provides.
PROVIDED_BY = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "pynvml": "nvidia-ml-py",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Source:
    """Where pip finds labkit: on PyPI once it is `released` there, else in the repository at `address`, as git clones
    it. Without either, it is in the folder of a clone, in which commands then have to be run."""

    address: str = ""
    released: bool = False

    @property
    def is_folder(self) -> bool:
        return not self.address and not self.released

    def labkit(self, extras: str = "") -> str:
        """The requirement of labkit with these extras, such as "kaggle" or "models,notebooks"."""
        extras = f"[{extras}]" if extras else ""
        return f".{extras}" if self.is_folder else f"labkit{extras}{self._repository()}"

    def labs(self) -> str:
        """The requirement of what labkit's labs import."""
        subdirectory = "" if self.released else "#subdirectory=notebooks"
        return "./notebooks" if self.is_folder else f"labkit-labs{self._repository()}{subdirectory}"

    def wheel(self) -> str:
        """The requirement of labkit where no clone is: the wheel that `pip wheel --no-deps .` makes in one."""
        return f"labkit-{__version__}-py3-none-any.whl" if self.is_folder else self.labkit()

    def _repository(self) -> str:
        return "" if self.released else f" @ git+{self.address}"


SOURCE = Source(address="", released=False)


def pip_install(*packages: str) -> str:
    """The command that installs packages for this interpreter, in the versions that labkit works with. A package may be
    the name of the module that it provides, and may have a version of its own ("torch<2.12")."""
    try:
        ours = [requirement.partition(";")[0].strip() for requirement in requires("labkit") or ()]
    except PackageNotFoundError:  # labkit runs from a folder on PYTHONPATH
        ours = []
    versions = {re.split(r"[^\w.-]", each)[0]: each for each in ours}
    names = [PROVIDED_BY.get(package, package) for package in packages]
    pip = [sys.executable, "-m", "pip", "install"]
    if find_spec("pip") is None and which("uv"):  # an environment of uv's has no pip
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *(versions.get(name, name) for name in names)])


def install_the_labs() -> str:
    """The command that installs labkit and what its labs import, and where to run it."""
    where = "in the folder of a clone of labkit: " if SOURCE.is_folder else ""
    return where + pip_install(SOURCE.labkit(), SOURCE.labs())

"""The commands that labkit's messages advise; the texts' are in tests/integration/test_install.py."""

import re
import sys

import pytest

from labkit import cli, install
from labkit.install import Source, install_the_labs, pip_install
from labkit.version import __version__


def test_what_is_advised_is_for_this_interpreter_in_versions_that_labkit_works_with():
    advised = pip_install("transformers", "PIL", "numpy_financial", "torch<2.12")

    assert advised.startswith(f"{sys.executable} -m pip install ")
    assert re.fullmatch(r".* 'transformers>=[\d.]+' pillow numpy_financial 'torch<2.12'", advised)


def test_in_an_environment_without_pip_the_advice_is_uvs_if_there_is_uv(monkeypatch):
    """Both made up."""
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    monkeypatch.setattr(install, "which", {"uv": "/usr/bin/uv"}.get)
    assert pip_install("pillow") == f"uv pip install --python {sys.executable} pillow"
    monkeypatch.setattr(install, "which", lambda name: None)
    assert pip_install("pillow") == f"{sys.executable} -m pip install pillow"


@pytest.mark.parametrize(
    ("source", "labkit", "labs"),
    [
        (Source(), ".[kaggle]", "./notebooks"),
        (
            Source("https://example.org/me/labkit.git"),
            "labkit[kaggle] @ git+https://example.org/me/labkit.git",
            "labkit-labs @ git+https://example.org/me/labkit.git#subdirectory=notebooks",
        ),
        (Source("https://example.org/me/labkit.git", released=True), "labkit[kaggle]", "labkit-labs"),
    ],
)
def test_labkit_is_where_the_settings_say(source, labkit, labs, monkeypatch):
    monkeypatch.setattr(install, "SOURCE", source)

    assert (source.labkit("kaggle"), source.labs()) == (labkit, labs)
    assert source.wheel() == (f"labkit-{__version__}-py3-none-any.whl" if source.is_folder else source.labkit())
    assert ("in the folder of a clone" in install_the_labs()) is source.is_folder


def test_a_verb_that_needs_an_absent_package_names_the_command(capsys, monkeypatch):
    def lacking(name):
        def doctor(**options):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr("labkit.machine.doctor", doctor)
        return cli.main(["doctor"])

    assert lacking("pandas._libs") == 2
    told = f"labkit: this needs pandas, which is not installed: {pip_install('pandas')}\n"
    assert capsys.readouterr().err == told
    with pytest.raises(ModuleNotFoundError):  # a mistake of labkit's own
        lacking("labkit.nothing")

"""What a process is called that a rank has left running."""

from types import SimpleNamespace

import pytest

from labkit.launcher.rank_processes import command_in_words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/usr/bin/python3", "-m", "http.server", "8000"], "python3 -m http.server …"),
        (["sleep", "600"], "sleep …"),
        (["python3"], "python3"),
        ([], "python3"),  # it is exiting
    ],
)
def test_a_process_is_named_without_its_arguments(command, words):
    process = SimpleNamespace(cmdline=lambda: command, name=lambda: "python3", cwd=lambda: "/")
    assert command_in_words(process) == words

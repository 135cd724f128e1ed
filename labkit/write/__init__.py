"""Training scripts as lists of titled cells, and the notebook cells that go into them."""

from labkit.write.cells import Cell
from labkit.write.options import Option, check_flags, command_line, options_of, own_options, read_back
from labkit.write.script import Script, script_names

__all__ = [
    "Cell",
    "Option",
    "Script",
    "check_flags",
    "command_line",
    "options_of",
    "own_options",
    "read_back",
    "script_names",
]

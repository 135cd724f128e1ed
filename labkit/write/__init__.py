"""Training scripts as lists of titled cells, and the notebook cells that go into them."""

from labkit.write.cells import Cell
from labkit.write.options import Option, check_arguments, command_line, options_of
from labkit.write.script import Script, script_names

__all__ = ["Cell", "Option", "Script", "check_arguments", "command_line", "options_of", "script_names"]

"""Training scripts as lists of titled cells, and the notebook cells that replace them."""

from labkit.write.cells import Cell
from labkit.write.completion import completed
from labkit.write.compose import is_composed, is_library, script_files, script_names, strategy_of
from labkit.write.options import (
    Option,
    check_flags,
    command_line,
    extra_options,
    options_of,
    own_options,
    read_back,
)
from labkit.write.script import Script

__all__ = [
    "Cell",
    "Option",
    "Script",
    "check_flags",
    "command_line",
    "completed",
    "extra_options",
    "is_composed",
    "is_library",
    "options_of",
    "own_options",
    "read_back",
    "script_files",
    "script_names",
    "strategy_of",
]

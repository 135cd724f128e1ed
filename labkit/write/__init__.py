"""Handles training scripts as lists of titled cells, and the notebook cells that replace them."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.write.call_options import CallOptions as CallOptions  # The base of LaunchOptions and JobOptions
    from labkit.write.call_options import expected as expected  # Metadata of a field whose type says too little
    from labkit.write.call_options import flag as flag  # Metadata of a field that is also a flag
    from labkit.write.call_options import whole_number as whole_number  # `"2"` as 2
    from labkit.write.cells import Cell as Cell  # `text` is the body below the title line, verbatim
    from labkit.write.cells import has_main_guard as has_main_guard  # Whether a cell starts the script
    from labkit.write.cells import is_python as is_python  # Whether Python can parse a text
    from labkit.write.completion import completed as completed  # The script with the extras that declare the options
    from labkit.write.compose import is_composed as is_composed  # Whether a script has all the cells of train.py, from
    from labkit.write.compose import is_library as is_library  # Whether all cells of a script are from the library
    from labkit.write.compose import library as library  # labkit's own parts, read once per process
    from labkit.write.compose import nearest as nearest  # `
    from labkit.write.compose import script_files as script_files  # The files of scripts/ by relative path, from the
    from labkit.write.compose import script_names as script_names  # The names of labkit's own scripts, which are the
    from labkit.write.compose import strategy_of as strategy_of  # The name of the script's strategy
    from labkit.write.compose import with_extra as with_extra  # The cells of a composed script with those of one more
    from labkit.write.contract import as_cell as as_cell  # The Cell for a value that was passed for it
    from labkit.write.files import read_file as read_file  # The content of a file
    from labkit.write.files import text_of as text_of  # The text of a file of Python
    from labkit.write.launch_options import LaunchOptions as LaunchOptions  # How a script is launched, independent of
    from labkit.write.options import Option as Option  # One `--flag`
    from labkit.write.options import check_flags as check_flags  # Raise ScriptError for a `--flag` among raw arguments
    from labkit.write.options import command_line as command_line  # `steps=200, precision="bf16"` as `["--steps",
    from labkit.write.options import extra_options as extra_options  # The options that each extra would add to a
    from labkit.write.options import options_of as options_of  # The long options of a script by parameter name
    from labkit.write.options import options_of_part as options_of_part  # The options that the cells of a strategy, a
    from labkit.write.options import own_options as own_options  # The options that are declared by the cells of the
    from labkit.write.options import read_back as read_back  # The values of the script's options in raw arguments, by
    from labkit.write.script import Script as Script  # A training script
else:
    __getattr__, __dir__ = face(__name__)

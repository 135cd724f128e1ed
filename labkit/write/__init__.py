"""Handles training scripts as lists of titled cells, and the notebook cells that replace them."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.write.cells import Cell as Cell  # one titled cell: its text, the names that it defines and uses
    from labkit.write.cells import is_python as is_python  # whether Python can parse a text
    from labkit.write.compose import fitted as fitted  # cells of a script that fit one another
    from labkit.write.compose import is_composed as is_composed  # whether a script has all the cells of train.py
    from labkit.write.compose import is_library as is_library  # whether all cells of a script are labkit's own
    from labkit.write.compose import library as library  # labkit's own strategies, extras and tasks
    from labkit.write.compose import originals as originals  # its cells, the library's as they are in their files
    from labkit.write.compose import script_files as script_files  # the files of scripts/, by relative path
    from labkit.write.compose import script_names as script_names  # the names of labkit's scripts: the strategies
    from labkit.write.compose import strategy_of as strategy_of  # the name of a script's strategy
    from labkit.write.compose import with_extra as with_extra  # the cells of a script with those of one more extra
    from labkit.write.contract import as_cell as as_cell  # the Cell made of a text, a function or a class
    from labkit.write.script import Script as Script  # a training script
    from labkit.write.script import read_file as read_file  # the content of a user's file
    from labkit.write.script import text_of as text_of  # the text of a Python file
    from labkit.write.script_options import Option as Option  # one `--flag` of a script
    from labkit.write.script_options import check_flags as check_flags  # refuses a flag that a script does not have
    from labkit.write.script_options import check_split as check_split  # whether a global batch splits evenly
    from labkit.write.script_options import command_line as command_line  # parameters as the script's arguments
    from labkit.write.script_options import completed as completed  # the script with the extras that its options need
    from labkit.write.script_options import extra_options as extra_options  # the options that each extra would add
    from labkit.write.script_options import options_of as options_of  # the options of a script by parameter name
    from labkit.write.script_options import options_of_strategy as options_of_strategy  # the options of its strategy
    from labkit.write.script_options import read_back as read_back  # the values of the options in a command line
else:
    __getattr__, __dir__ = face(__name__)

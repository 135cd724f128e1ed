"""Finds what a program needs beside it, so that it can travel to another machine: modules, scripts, small data."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.needs.needs import NeededFile as NeededFile  # a file, and the name that the program finds it by
    from labkit.needs.needs import Needs as Needs  # the files, and what is missing
    from labkit.needs.needs import needs_of_notebook as needs_of_notebook  # of a notebook's code cells
    from labkit.needs.needs import needs_of_script as needs_of_script  # of a script
else:
    __getattr__, __dir__ = face(__name__)

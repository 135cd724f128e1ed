"""Finds mistakes that hang, corrupt or slow distributed training by static analysis; the script is never run."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.checking.checker import check as check  # finds the mistakes in a script, or in a migration
    from labkit.checking.checker import warn as warn  # warns on stderr, before a launch, of what may hang or be wrong
    from labkit.checking.effects import STATISTICS as STATISTICS  # names of buffers on which ranks need not agree
    from labkit.checking.effects import WRITE_APART as WRITE_APART  # what ranks make of a forward that writes, as text
    from labkit.checking.effects import WRITE_LOST as WRITE_LOST
    from labkit.checking.effects import WRITE_OF_RANK_0 as WRITE_OF_RANK_0
    from labkit.checking.facts import facts_of as facts_of  # the facts of a script, read from its text
    from labkit.checking.findings import Findings as Findings  # what `check` returns; displays itself
    from labkit.checking.formats import github as github  # findings as annotations of a pull request on GitHub
    from labkit.checking.formats import sarif as sarif  # findings in the format of code scanning, SARIF 2.1.0
    from labkit.checking.source import files_in as files_in  # lists the scripts and notebooks below a folder
    from labkit.checking.source import python_of_cell as python_of_cell  # a notebook cell without IPython's syntax
else:
    __getattr__, __dir__ = face(__name__)

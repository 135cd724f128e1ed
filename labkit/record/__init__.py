"""A run on disk: file names, records, bounded series, and reading them back.

Ranks and notebook communicate only through the run folder. This package imports only the standard library and psutil,
so that a terminal can list runs without importing torch or widgets; its names are imported on first use, so that a rank
can use some of its modules without the others.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.record.cause import Cause as Cause  # why a run failed, was stopped or is lost
    from labkit.record.cause import Place as Place  # a line of the script, and its cell
    from labkit.record.fold import NodeFold as NodeFold  # Folds the ranks of one node of an attempt
    from labkit.record.fold import NodeFolds as NodeFolds  # What the supervisors of the nodes have folded
    from labkit.record.fold import are_folded as are_folded  # Whether the ranks of such a run are folded
    from labkit.record.folder import RUN_ID as RUN_ID
    from labkit.record.folder import RunFolder as RunFolder  # The names of the files in one run folder
    from labkit.record.folder import check_root as check_root  # Raises RunFolderError if runs cannot be stored there
    from labkit.record.history import HostHistory as HostHistory  # One machine, in bounded memory
    from labkit.record.history import RankHistory as RankHistory  # What one rank has written so far,
    from labkit.record.manifest import Manifest as Manifest  # What was launched
    from labkit.record.manifest import ManifestScript as ManifestScript  # the digest of its script, and its own file
    from labkit.record.manifest import Nodes as Nodes  # The nodes of a run on several
    from labkit.record.manifest import ScriptFacts as ScriptFacts  # what a script shards, wraps and uses
    from labkit.record.manifest import SweepPoint as SweepPoint  # The place of a run in a sweep
    from labkit.record.nodes import beat as beat  # Write a node's heartbeat, with its address towards the first node,
    from labkit.record.nodes import heard_nodes as heard_nodes  # The names of a run's nodes that have not ended and
    from labkit.record.nodes import is_on_this_host as is_on_this_host  # Whether a node's processes run on this host
    from labkit.record.nodes import last_beat as last_beat  # `time` (seconds since the epoch, on that node's clock),
    from labkit.record.nodes import name_of as name_of  # The name of a node in messages
    from labkit.record.nodes import record_starting_supervisor as record_starting_supervisor  # Record the identity of
    from labkit.record.nodes import supervisor_is_starting as supervisor_is_starting  # Whether a run's supervisor has
    from labkit.record.nodes import supervisor_of as supervisor_of  # The supervisor of a node, or of a run on one
    from labkit.record.reader import RunReader as RunReader  # All ranks of a run, through all its attempts
    from labkit.record.records import CATEGORIES as CATEGORIES  # A storage that fits several categories counts
    from labkit.record.records import DESCRIBING as DESCRIBING  # Reported values that describe the run,
    from labkit.record.records import PHASES as PHASES
    from labkit.record.records import End as End  # How a rank's script ended
    from labkit.record.records import Event as Event  # What the owner asked of the ranks
    from labkit.record.records import Header as Header  # The start of a rank
    from labkit.record.records import Losses as Losses  # Says which of the losses that a rank recorded count
    from labkit.record.records import Model as Model  # What a rank holds after its first step, and where
    from labkit.record.records import Peak as Peak  # Bytes held at the peak, in total and by category
    from labkit.record.records import Record as Record  # Any of them
    from labkit.record.records import Records as Records  # The records of one rank's file, as they are written
    from labkit.record.records import Report as Report  # What the script reported
    from labkit.record.records import Scalar as Scalar  # A reported value
    from labkit.record.records import Step as Step  # The sums over some steps
    from labkit.record.requests import Decision as Decision
    from labkit.record.requests import Meeting as Meeting  # How far the ranks have come, from one look at the folder
    from labkit.record.requests import RequestFolder as RequestFolder  # The files of one request
    from labkit.record.requests import is_only_writable_by as is_only_writable_by  # Whether these files and folders
    from labkit.record.requests import post as post  # Append a request
    from labkit.record.state import FINAL_STATES as FINAL_STATES
    from labkit.record.state import LeftRunning as LeftRunning  # `processes` are such as "`python upload.py` (pid
    from labkit.record.state import State as State  # The state of a run
    from labkit.record.state import StateName as StateName
    from labkit.record.state import current_ranks as current_ranks  # The ranks of the newest attempt
    from labkit.record.state import left_running as left_running  # What the supervisors of a run have written, by
    from labkit.record.state import read_state as read_state  # The state of a run
    from labkit.record.state import supervisor_is_alive as supervisor_is_alive
    from labkit.record.state import supervisor_is_elsewhere as supervisor_is_elsewhere  # Whether the run belongs to
    from labkit.record.state import write_left_running as write_left_running  # Raises OSError
    from labkit.record.state import write_state as write_state
    from labkit.record.state import written_state as written_state  # The content of state.json
    from labkit.record.stored_runs import find_run as find_run  # The run that `which` identifies
    from labkit.record.stored_runs import list_runs as list_runs  # Run folders under the runs root, oldest first
    from labkit.record.stored_runs import runs_root as runs_root  # Where runs are stored
    from labkit.record.stored_runs import unfinished_launches as unfinished_launches  # Folders of launches that were
    from labkit.record.table import COLUMNS as COLUMNS  # Every row has these columns, even if nothing was
    from labkit.record.table import Glance as Glance  # The newest `loss`, which may be NaN, and the finite
    from labkit.record.table import Row as Row  # A row of `rows`
    from labkit.record.table import glance as glance  # The newest attempt
    from labkit.record.table import rows as rows  # One row per attempt, rank and logged step, from all
else:
    __getattr__, __dir__ = face(__name__)

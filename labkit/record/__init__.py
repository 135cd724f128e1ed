"""A run on disk: file names, records, and reading them back.

Ranks and notebook communicate only through the run folder. This package imports only the standard library and psutil,
so that a terminal can list runs without importing torch or widgets; its names are imported on first use, so that a rank
can use some of its modules without the others.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.record.cause import Cause as Cause  # why a run failed, was stopped or is lost
    from labkit.record.cause import Place as Place  # a line of the script, and its cell
    from labkit.record.fold import NodeFold as NodeFold  # folds the ranks of one node into a small file
    from labkit.record.folder import RunFolder as RunFolder  # the names of the files in one run folder
    from labkit.record.history import HostHistory as HostHistory  # one machine, in bounded memory
    from labkit.record.history import RankHistory as RankHistory  # what one rank has recorded, in bounded memory
    from labkit.record.manifest import Manifest as Manifest  # run.json: what was launched
    from labkit.record.manifest import Nodes as Nodes  # the nodes of a run on several
    from labkit.record.manifest import ScriptFacts as ScriptFacts  # what a script shards, wraps and uses
    from labkit.record.manifest import SweepPoint as SweepPoint  # the place of a run in a sweep
    from labkit.record.nodes import Node as Node  # the supervisor of a node and its heartbeats
    from labkit.record.reader import RunReader as RunReader  # all ranks of a run, through all its attempts
    from labkit.record.records import End as End  # how a rank's script ended
    from labkit.record.records import Event as Event  # what the run's owner asked of the ranks
    from labkit.record.records import Model as Model  # what a rank holds after its first step, and where
    from labkit.record.records import Peak as Peak  # the moment at which a rank holds the most memory
    from labkit.record.records import Records as Records  # a file of records, as they are written
    from labkit.record.records import Report as Report  # what the script reported
    from labkit.record.records import Step as Step  # the sums over some steps
    from labkit.record.requests import RequestFolder as RequestFolder  # the files of one request to the ranks
    from labkit.record.state import LeftRunning as LeftRunning  # what the ranks of a run left running
    from labkit.record.state import State as State  # state.json: how a run stands
    from labkit.record.state import StateName as StateName  # the names of a run's states
    from labkit.record.table import Glance as Glance  # a run in a list of many: some losses, newest and best values
    from labkit.record.table import rows as rows  # one row per attempt, rank and recorded step
else:
    __getattr__, __dir__ = face(__name__)

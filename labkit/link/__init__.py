"""Tries and measures the link between this machine's ranks, with short runs."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.link.measure import KINDS as KINDS
    from labkit.link.measure import CollectiveTime as CollectiveTime  # Seconds of one call on an array of `bytes`
    from labkit.link.measure import Link as Link  # The link between `ranks` ranks of a machine
    from labkit.link.measure import link_settings as link_settings  # The variables that this many ranks need to
    from labkit.link.measure import load as load  # The value stored under this key
    from labkit.link.measure import machine_key as machine_key  # A key with everything that the answer of a
    from labkit.link.measure import measure_link as measure_link  # Run each kind of collective on this number of
    from labkit.link.measure import remembered_link as remembered_link  # The stored measurement for this number of
    from labkit.link.measure import remembered_links as remembered_links  # The stored measurements of this machine
    from labkit.link.measure import remembered_preflight as remembered_preflight  # The stored result of this
    from labkit.link.measure import short_run as short_run  # `(answer, problem)`
    from labkit.link.measure import store as store  # Store a value next to the others
    from labkit.link.measure import try_link as try_link  # Let this many ranks sum a number, with one setting after
else:
    __getattr__, __dir__ = face(__name__)

"""Tries and measures the link between this machine's ranks, with short runs."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.link.measure import KINDS as KINDS  # the kinds of collectives that are measured
    from labkit.link.measure import CollectiveTime as CollectiveTime  # latency and seconds per byte of one kind
    from labkit.link.measure import Link as Link  # the measured link between some ranks of a machine
    from labkit.link.measure import link_settings as link_settings  # the variables that ranks need to reach each other
    from labkit.link.measure import load as load  # a value from the cache of this machine
    from labkit.link.measure import machine_key as machine_key  # a key with all that a measurement depends on
    from labkit.link.measure import measure_link as measure_link  # measures every kind of collective; stores the result
    from labkit.link.measure import remembered_link as remembered_link  # the stored measurement for a number of ranks
    from labkit.link.measure import remembered_links as remembered_links  # the ones for all numbers of ranks
    from labkit.link.measure import remembered_preflight as remembered_preflight  # the stored result of try_link
    from labkit.link.measure import short_run as short_run  # runs a script on ranks and returns the answer it wrote
    from labkit.link.measure import store as store  # stores a value in the cache of this machine
    from labkit.link.measure import try_link as try_link  # tries settings until the ranks reach each other
else:
    __getattr__, __dir__ = face(__name__)

"""Tells people what happens to a run: to an address, to a command of theirs, or in a terminal."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.alerts.addresses import Address as Address  # where alerts are sent
    from labkit.alerts.addresses import addresses_of as addresses_of  # checks those of a launch
    from labkit.alerts.addresses import start_sender as start_sender  # starts the process that sends a run's alerts
    from labkit.alerts.events import Event as Event  # what happened to a run
    from labkit.alerts.events import Events as Events  # what happens to a run, each thing once
else:
    __getattr__, __dir__ = face(__name__)

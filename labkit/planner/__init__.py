"""Predicts the memory and time of a training run before it is launched."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.planner.candidate import Candidate as Candidate  # One way to train
    from labkit.planner.candidate import evaluate as evaluate  # The candidate with layout, peak and step time, and
    from labkit.planner.candidate import unfit as unfit  # Why the device cannot train the layout, regardless of memory
    from labkit.planner.data_sheets import DEVICES as DEVICES  # Memory is what torch reports, less than the nominal
    from labkit.planner.data_sheets import OUTSIDE_TENSORS as OUTSIDE_TENSORS  # NCCL_BUFFSIZE in its documentation)
    from labkit.planner.data_sheets import THIS_MACHINE as THIS_MACHINE
    from labkit.planner.data_sheets import Device as Device  # `memory` and `usable` (for tensors) in bytes
    from labkit.planner.data_sheets import device_named as device_named  # A preset by its name in any spelling
    from labkit.planner.data_sheets import devices_named as devices_named  # `(count, device)` of "2xT4", "T4x2", "8 x
    from labkit.planner.layout import layout_of as layout_of  # The layout of the script with the extras that declare
    from labkit.planner.layout import options_of_strategy as options_of_strategy  # The options of the strategy's cells
    from labkit.planner.measured import Memory as Memory  # The result of `run.memory()`
    from labkit.planner.measured import Trial as Trial  # `step_seconds` is the slowest rank's mean over its newest
    from labkit.planner.model.facts import ModelFacts as ModelFacts  # `itemsize`
    from labkit.planner.model.facts import facts_of as facts_of  # Determine the facts in a child process
    from labkit.planner.overview import bar_of as bar_of  # The candidate's predicted memory, with the step time as a
    from labkit.planner.overview import outlook as outlook  # The chosen strategy with its own options
    from labkit.planner.overview import verdict_of as verdict_of  # ("fits", "does not fit" or "impossible", one
    from labkit.planner.planned import Plan as Plan  # The result of `labkit.plan`
    from labkit.planner.planning import plan as plan  # Predict the memory per rank and the step time of a script, what
    from labkit.planner.speed.schedules import actions as actions  # The actions of `rank` in one step
    from labkit.planner.speed.speed_model import SpeedModel as SpeedModel  # Looks up rates and links once for each
    from labkit.planner.speed.speed_model import measure_speed as measure_speed  # Measure on this machine what
    from labkit.planner.speed.step_time import StepTime as StepTime  # `seconds` of an optimizer step, between `low`
    from labkit.planner.variations import OTHER_TRAINING as OTHER_TRAINING  # Not the same training as on one rank, so
    from labkit.planner.variations import extras_of as extras_of  # The extras of the script, even if the user has
    from labkit.planner.variations import needed as needed  # The parameters without those that equal an extra's
    from labkit.planner.variations import under as under  # Another strategy's script with these extras, if compatible,
    from labkit.planner.variations import variants as variants  # By name
else:
    __getattr__, __dir__ = face(__name__)

"""Predicts the memory and time of a training run before it is launched."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.planner.candidate import Candidate as Candidate  # one way to train: its memory, time and verdict
    from labkit.planner.candidate import evaluate as evaluate  # fills in a candidate's memory, time and verdict
    from labkit.planner.candidate import refuse as refuse  # raises what a plan refuses without the model
    from labkit.planner.data_sheets import DEVICES as DEVICES  # the presets, one for each row of devices.csv
    from labkit.planner.data_sheets import OUTSIDE_TENSORS as OUTSIDE_TENSORS  # a GPU's bytes beside the tensors
    from labkit.planner.data_sheets import THIS_MACHINE as THIS_MACHINE  # the name of this machine's device
    from labkit.planner.data_sheets import Device as Device  # what a plan must know of a device
    from labkit.planner.data_sheets import device_named as device_named  # the preset with a name, in any spelling
    from labkit.planner.data_sheets import devices_named as devices_named  # "2xT4" as (2, the T4)
    from labkit.planner.layout import layout_of as layout_of  # how a script divides training over the ranks
    from labkit.planner.measured import Memory as Memory  # measured memory beside the planned; `run.memory()`
    from labkit.planner.measured import Trial as Trial  # a short run beside its prediction
    from labkit.planner.memory.pipeline import actions as actions  # what a pipeline rank computes in a step, in order
    from labkit.planner.model.facts import ModelFacts as ModelFacts  # sizes and costs of a model's units
    from labkit.planner.model.facts import facts_of as facts_of  # determines these facts in a child process
    from labkit.planner.planned import Plan as Plan  # what `plan` returns
    from labkit.planner.planning import plan as plan  # predicts the memory and time of a training run
    from labkit.planner.script_plan import ScriptPlan as ScriptPlan  # what `plan` returns for any other script
    from labkit.planner.search import outlook as outlook  # all strategies at one setting, as the panel shows them
    from labkit.planner.speed.speed_model import SpeedModel as SpeedModel  # step times on a device, by layout
    from labkit.planner.speed.speed_model import measure_speed as measure_speed  # measures the speed of this machine
    from labkit.planner.speed.step_time import StepTime as StepTime  # predicted seconds of a step, and their parts
    from labkit.planner.strategies.known import strategy_named as strategy_named  # what the planner knows of a strategy
    from labkit.planner.variations import needed as needed  # parameters without those that equal an extra's default
    from labkit.planner.variations import variants as variants  # a script under every strategy, by name
else:
    __getattr__, __dir__ = face(__name__)

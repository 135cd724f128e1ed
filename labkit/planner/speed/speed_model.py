"""Predicts how fast a script's model trains on a device under any layout, from measurements on this machine or data
sheets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from labkit.arguments import Parameters
from labkit.hardware import hardware
from labkit.link import Link, measure_link, remembered_link
from labkit.planner.data_sheets import Device
from labkit.planner.model.facts import ModelFacts
from labkit.planner.networks import Hosts
from labkit.planner.speed.rates import Rates, assumed_link, assumed_rates, measure_rates, remembered_rates
from labkit.planner.speed.step_time import StepTime, scaling, step_time
from labkit.planner.strategies.strategy import Layout
from labkit.write import Script

MEASURED_WITH = (2, 1, 4, 8)  # other numbers of ranks whose measurements are used


@dataclass
class SpeedModel:
    """Looks up rates and links once for each precision and number of ranks. `ranks` is the number of ranks with which
    this machine's rates were measured; `parameters` are those of the requested script."""

    script: Script
    facts: ModelFacts
    device: Device
    ranks: int
    parameters: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rates, self._link = cache(self._find_rates), cache(self._find_link)

    def __call__(self, layout: Layout) -> StepTime | None:
        """The step time; None if the speed is unknown: a CPU has no data sheet, so it must be measured."""
        device = self.device
        here = min(layout.ranks, device.box) if device.nodes > 1 else layout.ranks
        rates = self._rates_of(layout, here)
        link = self._link(layout.ranks) if layout.ranks > 1 else None
        if rates is None or (link is None and layout.ranks > 1):
            return None
        several = device.nodes > 1 or not device.shared  # CPU ranks use only the hosts requested
        hosts = Hosts(device.box, device.network) if several else None
        return step_time(self.facts, layout, rates.shared_by(max(here, rates.ranks)), link, hosts)

    def scaling(self, layout: Layout) -> dict[int, StepTime]:
        """Step times with the same micro-batch on each of 1, 2, 4 … 1,024 ranks, on as many machines as needed; empty
        if the speed is unknown."""
        rates = self._rates_of(layout, self.ranks)
        link = self._link(max(2, min(layout.ranks, self.device.box)))
        if rates is None or link is None:
            return {}
        return scaling(self.facts, layout, rates, link, box=self.device.box, network=self.device.network)

    def _rates_of(self, layout: Layout, ranks: int) -> Rates | None:
        """None if the strategy's communication is unknown, too: that of the user's own, and of split layers or stages
        unless layers are units, whose output sizes are known."""
        if not layout.strategy.name or (self.facts.layers and (layout.tensor > 1 or layout.stages > 1)):
            return None
        samples = layout.micro_batch / layout.context
        return self._rates(layout.precision, layout.variant.half_parameters, samples, ranks)

    def _find_rates(self, precision: str, half_parameters: bool, samples: float, ranks: int) -> Rates | None:
        """Rates measured with these ranks if available, else with another number, else from the data sheet."""
        parameters = {**self.parameters, "precision": precision}
        counts = (ranks, self.ranks, *MEASURED_WITH) if self.device.is_this_machine else ()
        for count in dict.fromkeys(counts):
            if rates := remembered_rates(self.script, count, parameters):
                return rates
        return assumed_rates(self.facts, self.device, precision, samples, half_parameters)

    def _find_link(self, ranks: int) -> Link | None:
        near = max(2, min(ranks, self.device.box))
        if self.device.is_this_machine:
            here = hardware()
            for count in dict.fromkeys((ranks, near, self.ranks)):
                if link := remembered_link(here, count, here.backend):
                    return link
        return assumed_link(self.device, near)


def measure_speed(script: Script, ranks: int, parameters: Parameters, *, again: bool = True, nodes: int = 1) -> None:
    """Measure on this machine what SpeedModel looks up, in about 20 seconds. Only what is missing is measured, unless
    `again`. `ranks` are those of one of the `nodes`. Raises LaunchError if it cannot."""
    here = hardware()
    if again or remembered_rates(script, ranks, parameters) is None:
        measure_rates(script, ranks, parameters)
    linked = max(2, ranks) if nodes > 1 else ranks
    if linked > 1 and (again or remembered_link(here, linked, here.backend) is None):
        measure_link(linked, machine=here)

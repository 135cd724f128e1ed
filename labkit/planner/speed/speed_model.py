"""Predicts how fast a script's model trains on a device under any layout, from measurements on this machine or data
sheets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from labkit.arguments import Parameters, Value
from labkit.errors import LaunchError
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
    _known_rates: dict[_Setting, Rates | None] = field(default_factory=dict, repr=False)
    _known_links: dict[int, Link | None] = field(default_factory=dict, repr=False)

    def __call__(self, layout: Layout) -> StepTime | None:
        """The step time; None if the speed is unknown: a CPU has no data sheet, so it must be measured."""
        if not self._knows(layout):
            return None
        device = self.device
        here = min(layout.ranks, device.box) if device.nodes > 1 else layout.ranks
        rates = self._rates(layout, here)
        link = self._link(layout.ranks) if layout.ranks > 1 else None
        if rates is None or (link is None and layout.ranks > 1):
            return None
        several = device.nodes > 1 or not device.shared  # CPU ranks use only the hosts requested
        hosts = Hosts(device.box, device.network) if several else None
        return step_time(self.facts, layout, crowded(rates, here), link, hosts)

    def scaling(self, layout: Layout) -> dict[int, StepTime]:
        """Step times with the same micro-batch on each of 1, 2, 4 … 1,024 ranks, on as many machines as needed; empty
        if the speed is unknown."""
        if not self._knows(layout):
            return {}
        rates = self._rates(layout, self.ranks)
        link = self._link(max(2, min(layout.ranks, self.device.box)))
        if rates is None or link is None:
            return {}
        return scaling(self.facts, layout, rates, link, box=self.device.box, network=self.device.network)

    def _knows(self, layout: Layout) -> bool:
        """Whether the strategy's communication is known: not for the user's own, nor for split layers or stages unless
        layers are units, whose output sizes are known."""
        return bool(layout.strategy.name) and not (self.facts.layers and (layout.tensor > 1 or layout.stages > 1))

    def _rates(self, layout: Layout, ranks: int) -> Rates | None:
        half, samples = layout.variant.half_parameters, layout.micro_batch / layout.context
        setting = _Setting(layout.precision, half, samples, ranks)
        if setting not in self._known_rates:
            try:
                self._known_rates[setting] = self._find_rates(setting)
            except LaunchError:
                self._known_rates[setting] = None
        return self._known_rates[setting]

    def _find_rates(self, setting: _Setting) -> Rates:
        """Rates measured with these ranks if available, else with another number, else from the data sheet."""
        parameters = _with_precision(self.parameters, setting.precision)
        counts = (setting.ranks, self.ranks, *MEASURED_WITH) if self.device.is_this_machine else ()
        for ranks in dict.fromkeys(counts):
            if rates := remembered_rates(self.script, ranks, parameters):
                return rates
        return assumed_rates(self.facts, self.device, setting.precision, setting.samples, setting.half_parameters)

    def _link(self, ranks: int) -> Link | None:
        if ranks not in self._known_links:
            try:
                self._known_links[ranks] = self._find_link(ranks)
            except LaunchError:
                self._known_links[ranks] = None
        return self._known_links[ranks]

    def _find_link(self, ranks: int) -> Link:
        near = max(2, min(ranks, self.device.box))
        if self.device.is_this_machine:
            here = hardware()
            for count in dict.fromkeys((ranks, near, self.ranks)):
                if link := remembered_link(here, count, here.backend):
                    return link
        return assumed_link(self.device, near)


class _Setting(NamedTuple):
    """What the rates of a model depend on."""

    precision: str
    half_parameters: bool
    samples: float
    ranks: int


def crowded(rates: Rates, ranks: int) -> Rates:
    """Rates scaled to more ranks sharing the cores than in the measurement."""
    if rates.cores is None or ranks <= rates.ranks:
        return rates
    longer = max(1.0, rates.contention * ranks / rates.ranks) / max(1.0, rates.contention)

    def line(seconds: tuple[float, float]) -> tuple[float, float]:
        return seconds[0] * longer, seconds[1] * longer

    assumption = f"{ranks} ranks share {rates.cores} cores, measured with {rates.ranks}: {longer:.1f} times as long"
    return replace(
        rates,
        ranks=ranks,
        both=line(rates.both),
        forward=line(rates.forward),
        ends=line(rates.ends),
        alike=line(rates.alike),
        optimizer=rates.optimizer * longer,
        copy=rates.copy * longer,
        tensor=rates.tensor * longer,
        dtensor=rates.dtensor * longer,
        split_pair=rates.split_pair * longer,
        contention=rates.contention * longer,
        waiting=rates.waiting * longer,
        assumed=(*rates.assumed, assumption),
    )


def measure_speed(script: Script, ranks: int, parameters: Parameters, *, again: bool = True, nodes: int = 1) -> None:
    """Measure on this machine what SpeedModel looks up, in about 20 seconds. Only what is missing is measured, unless
    `again`. `ranks` are those of one of the `nodes`. Raises LaunchError if it cannot."""
    precision, here = str(parameters.get("precision", "fp32")), hardware()
    parameters = _with_precision(parameters, precision)
    if again or remembered_rates(script, ranks, parameters) is None:
        measure_rates(script, ranks, parameters)
    linked = max(2, ranks) if nodes > 1 else ranks
    if linked > 1 and (again or remembered_link(here, linked, here.backend) is None):
        measure_link(linked, machine=here)


def _with_precision(parameters: Parameters, precision: str) -> dict[str, Value]:
    """The default precision is omitted, so that measurements without it are found."""
    others = {name: value for name, value in parameters.items() if name != "precision"}
    return others if precision == "fp32" else others | {"precision": precision}

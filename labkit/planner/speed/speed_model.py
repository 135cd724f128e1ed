"""How fast a script's model trains on a device under any layout: from what was measured here, or from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.errors import LaunchError
from labkit.launcher.hardware import hardware
from labkit.launcher.link.bandwidth import Link, measure_link, remembered_link
from labkit.planner.devices import Device
from labkit.planner.layout import Layout
from labkit.planner.model.facts import ModelFacts
from labkit.planner.networks import Hosts
from labkit.planner.speed.rates import Rates, assumed_link, assumed_rates, measure_rates, remembered_rates
from labkit.planner.speed.step_time import StepTime, scaling, step_time
from labkit.write import Script

__all__ = ["Pace", "crowded", "measure_pace"]

MEASURED_WITH = (2, 1, 4, 8)  # ranks, where it was not with those that are asked for


@dataclass
class Pace:
    """Rates and links are looked up once for each precision and number of ranks. `ranks`: with how many at work the
    rates of this machine were measured; `parameters` with which the script was asked for."""

    script: Script
    facts: ModelFacts
    device: Device
    ranks: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __call__(self, layout: Layout) -> StepTime | None:
        """None where nothing is known: a CPU has no data sheet, its speed is measured."""
        if not self._knows(layout):
            return None
        device = self.device
        here = min(layout.ranks, device.box) if device.nodes > 1 else layout.ranks
        rates = self._once(("rates", layout.precision, here), self._rates, layout.precision, here)
        link = self._once(("link", layout.ranks), self._link, layout.ranks) if layout.ranks > 1 else None
        if rates is None or (link is None and layout.ranks > 1):
            return None
        several = device.nodes > 1 or not device.shared  # ranks that share cores are on as many hosts as are asked for
        hosts = Hosts(device.box, device.network) if several else None
        return step_time(self.facts, layout, crowded(rates, here), link, hosts)

    def scaling(self, layout: Layout) -> dict[int, StepTime]:
        """The same micro-batch on each of 1, 2, 4 … 1,024 ranks, on as many such machines as that takes; nothing where
        nothing is known."""
        if not self._knows(layout):
            return {}
        rates = self._once(("rates", layout.precision, self.ranks), self._rates, layout.precision, self.ranks)
        near = max(2, min(layout.ranks, self.device.box))
        link = self._once(("link", near), self._link, near)
        if rates is None or link is None:
            return {}
        return scaling(self.facts, layout, rates, link, box=self.device.box, network=self.device.network)

    def _knows(self, layout: Layout) -> bool:
        """What a strategy communicates: a user's own may do anything, and of layers that are split or make stages the
        size of what they hand on is known only where they are units."""
        return bool(layout.strategy) and not (self.facts.layers and (layout.tensor > 1 or layout.stages > 1))

    def _once(self, key: Any, make: Any, *arguments: Any) -> Any:
        if key not in self._known:
            try:
                self._known[key] = make(*arguments)
            except LaunchError:
                self._known[key] = None
        return self._known[key]

    def _rates(self, precision: str, ranks: int) -> Rates | None:
        """With as many ranks at work if that was measured, or else with another number of them."""
        asked = _asked(self.parameters, precision)
        measured = (
            found
            for n in dict.fromkeys((ranks, self.ranks, *MEASURED_WITH) if self.device.is_this_machine else ())
            if (found := remembered_rates(self.script, n, asked))
        )
        return next(measured, None) or assumed_rates(self.facts, self.device, precision)

    def _link(self, ranks: int) -> Link | None:
        here = hardware() if self.device.is_this_machine else None
        near = max(2, min(ranks, self.device.box))
        measured = next(
            (
                link
                for n in dict.fromkeys((ranks, near, self.ranks))
                if here and (link := remembered_link(here, n, here.backend))
            ),
            None,
        )
        return measured or assumed_link(self.device, near)


def crowded(rates: Rates, ranks: int) -> Rates:
    """On a machine whose cores more ranks share than when it was measured: everything takes so much longer."""
    if rates.cores is None or ranks <= rates.ranks:
        return rates
    longer = max(1.0, rates.contention * ranks / rates.ranks) / max(1.0, rates.contention)

    def line(seconds: tuple[float, float]) -> tuple[float, float]:
        return seconds[0] * longer, seconds[1] * longer

    said = f"{ranks} ranks share {rates.cores} cores, measured with {rates.ranks}: {longer:.1f} times as long"
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
        assumed=(*rates.assumed, said),
    )


def measure_pace(
    script: Script, ranks: int, parameters: Mapping[str, Any], *, again: bool = True, nodes: int = 1
) -> None:
    """Measure on this machine what Pace looks up, which takes some twenty seconds; unless `again`, only what is not
    known. `ranks` are those of one of the `nodes`. Raises LaunchError when it cannot."""
    asked, here = _asked(parameters, str(parameters.get("precision", "fp32"))), hardware()
    if again or remembered_rates(script, ranks, asked) is None:
        measure_rates(script, ranks, asked)
    talking = max(2, ranks) if nodes > 1 else ranks
    if talking > 1 and (again or remembered_link(here, talking, here.backend) is None):
        measure_link(talking, machine=here)


def _asked(parameters: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The default is not named, so that what was measured without naming it is found."""
    others = {name: value for name, value in parameters.items() if name != "precision"}
    return others if precision == "fp32" else others | {"precision": precision}

"""Records claims that can be wrong: what a formula predicts, what was measured, and the difference."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit import words
from labkit.errors import LabError
from labkit.files import write_json
from labkit.stored_runs import runs_root
from labkit.text import gib, plain, slug
from labkit.view import aligned, grid

__all__ = ["Claim", "Claims", "amount"]

WAYS = ("equals", "at least", "at most")
BUSY = 1.5  # processes that want to run, per core: a lab's own ranks are about one for each


@dataclass(frozen=True)
class Claim:
    """`within` is relative to the prediction: 0.02 is 2%, 0 is exact. `because` names the reason for a difference.
    `timed` claims are measured with a clock, so a machine that is busier than `BUSY` can make them wrong. With
    `planned`, `measured` is the result of a second, independent calculation, and nothing was run. `options` are texts
    that stand for numbers."""

    name: str
    predicted: float
    measured: float
    unit: str = ""
    within: float = 0.0
    how: str = "equals"
    timed: bool = False
    because: str = ""
    planned: bool = False
    load: float = 0.0  # of a timed claim: processes that wanted to run in the minute before it was verified, per core
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the prediction holds. With a measured NaN no claim holds."""
        room = self.within * abs(self.predicted)
        above, below = self.measured >= self.predicted - room, self.measured <= self.predicted + room
        return {"equals": above and below, "at least": above, "at most": below}[self.how]

    @property
    def fails_the_lab(self) -> bool:
        """Whether it disagrees for a reason other than how fast this machine computes."""
        return not self.holds and (not self.timed or not math.isfinite(self.measured))

    @property
    def undecided(self) -> str:
        """Why a measurement that disagrees decides nothing: "too noisy to decide (load 3.1 per core)"; else empty. What
        is no number disagrees however busy the machine is."""
        if not self.timed or self.holds or not math.isfinite(self.measured) or self.load <= BUSY:
            return ""
        return f"too noisy to decide (load {self.load:.1f} per core)"

    def as_dict(self) -> dict[str, Any]:
        """The claim as it is stored."""
        return asdict(self) | {"holds": self.holds}

    def row(self) -> dict[str, str]:
        """The claim as formatted text."""
        bound = "" if self.how == "equals" else f"{self.how} "
        off = ""
        if math.isfinite(self.measured) and self.predicted and self.how == "equals":
            off = f"{self.measured / self.predicted - 1:+.2%}" if self.measured != self.predicted else "0"
        return {
            "claim": self.name,
            "predicted": bound + self.shown(self.predicted),
            "measured": "" if self.planned else self.shown(self.measured),
            "planned": self.shown(self.measured) if self.planned else "",
            "off by": off,
            "allowed": f"{self.within:.1%}" if self.within else "" if bound else "0",
            "verdict": "holds" if self.holds else self.undecided or "does not hold",
            "because": self.because,
        }

    def shown(self, number: float) -> str:
        """A number in the claim's unit, formatted, or the option that it stands for."""
        chosen = [text for text, value in self.options.items() if value == number and self.how == "equals"]
        return chosen[0] if chosen else amount(number, self.unit)


def amount(number: float, unit: str) -> str:
    """A number with its unit: "B", "s", "%" (of 1) and "times" are formatted."""
    if unit == "B":
        return f"{number:,.0f} B" if number < 1 << 20 else gib(number)
    if unit == "s":
        return words.seconds(number)
    if unit == "%":
        return f"{number:.1%}"
    text = f"{number:,.0f}" if float(number).is_integer() else words.quantity(number)
    return f"{text}×" if unit == "times" else f"{text} {unit}".strip()


class Claims:
    """The claims of one lab: `verify` compares the value of a formula with a measurement.

    Timed claims that disagree are shown but do not fail the lab, because a slow machine is not a mistake in it. They
    "do not hold", or are too noisy to decide where the machine was busier than `BUSY` in the minute before."""

    def __init__(self, lab: str):
        self.lab = lab
        self._claims: dict[str, Claim] = {}
        self._file = runs_root() / "claims" / f"{slug(lab)}.json"

    def verify(
        self,
        name: str,
        predicted: float,
        measured: float,
        unit: str = "",
        *,
        within: float = 0.0,
        how: str = "equals",
        timed: bool | None = None,
        planned: bool = False,
        because: str = "",
        options: Mapping[str, float] | None = None,
    ) -> None:
        """Record what a formula predicts and what was measured. The units "B", "s" and "%" (of 1) are formatted.

        `within`: the relative tolerance. `how`: "equals", "at least" or "at most". `timed`: measured with a clock, by
        default true for the unit "s". `planned`: `measured` is the result of a second, independent calculation.
        `because`: the reason for the difference. `options`: texts to show for numbers. Raises LabError for a
        prediction that is not a finite number.
        """
        if how not in WAYS:
            raise LabError(f"how must be one of {', '.join(map(repr, WAYS))}, got {how!r}")
        if not isinstance(predicted, int | float) or not math.isfinite(predicted):
            raise LabError(f"a prediction must be a finite number; got {predicted!r} for {name!r}")
        timed = unit == "s" if timed is None else timed
        self._claims[name] = Claim(
            name,
            predicted if isinstance(predicted, int) else float(predicted),  # NumPy's compare to no bool
            float(measured),
            unit,
            within,
            how,
            timed=timed,
            load=os.getloadavg()[0] / (os.cpu_count() or 1) if timed else 0.0,
            planned=planned,
            because=because,
            options=options or {},
        )
        self._write()

    def verify_each(self, values: Mapping[str, tuple[float, float]], unit: str = "", **how: Any) -> None:
        """`verify` for several claims of the same kind: by name, the formula's value and the measured one."""
        for name, (predicted, measured) in values.items():
            self.verify(name, predicted, measured, unit, **how)

    def require(self) -> None:
        """Raise LabError when a claim does not hold, unless it was measured with a clock."""
        wrong = [claim.row() for claim in self._claims.values() if claim.fails_the_lab]
        if wrong:
            details = "; ".join(
                f"{row['claim']}: predicted {row['predicted']}, "
                + (f"planned {row['planned']}" if row["planned"] else f"measured {row['measured']}")
                + (f" ({row['off by']}, allowed {row['allowed']})" if row["off by"] else "")
                for row in wrong
            )
            raise LabError(plain(f"{len(wrong)} of {len(self._claims)} claims of {self.lab} do not hold: {details}"))

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        claims = [claim.as_dict() for claim in self._claims.values()]
        write_json(self._file, {"format": 1, "lab": self.lab, "claims": claims})

    def _rows(self) -> list[dict[str, str]]:
        rows = [claim.row() for claim in self._claims.values()]
        empty = [name for name in ("planned", "because") if not any(row[name] for row in rows)]
        return [{name: text for name, text in row.items() if name not in empty} for row in rows]

    def __repr__(self) -> str:
        return plain(aligned(self._rows()))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rows = self._rows()
        return {"text/plain": repr(self), "text/html": grid(rows, sentences=("claim", "because"))}

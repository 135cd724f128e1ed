"""Records claims that can be wrong: a number predicted before a run, the measured number, and the difference."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from labkit import words
from labkit.errors import LabError
from labkit.files import write_json
from labkit.run import Run
from labkit.stored_runs import runs_root
from labkit.text import gib, plain, slug
from labkit.view import aligned, grid

__all__ = ["Claim", "Claims", "amount"]

WAYS = ("equals", "at least", "at most")


@dataclass(frozen=True)
class Claim:
    """`within` is relative to the prediction: 0.02 is 2%, 0 is exact. `because` names the reason for a difference.
    `timed` claims are measured with a clock, so a busy machine can make them wrong. With `planned`, `measured` is the
    result of a second, independent calculation, and nothing was run. `options` are texts that stand for numbers."""

    name: str
    predicted: float
    unit: str = ""
    within: float = 0.0
    how: str = "equals"
    timed: bool = False
    at: float = 0.0  # seconds since the epoch
    measured: float | None = None
    because: str = ""
    planned: bool = False
    load: float = 0.0  # processes that wanted to run when a timed claim was measured, per core
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether the prediction holds; None until it is measured. With a measured NaN no claim holds."""
        if self.measured is None:
            return None
        room = self.within * abs(self.predicted)
        above, below = self.measured >= self.predicted - room, self.measured <= self.predicted + room
        return {"equals": above and below, "at least": above, "at most": below}[self.how]

    @property
    def undecided(self) -> str:
        """Why a measurement that disagrees decides nothing: "too noisy to decide (load 3.1 per core)"; else empty."""
        if not self.timed or self.measured is None or self.holds:
            return ""
        return f"too noisy to decide (load {self.load:.1f} per core)"

    def as_dict(self) -> dict[str, Any]:
        """The claim as it is stored."""
        return asdict(self) | {"holds": self.holds}

    def row(self) -> dict[str, str]:
        """The claim as formatted text."""
        bound = "" if self.how == "equals" else f"{self.how} "
        off = ""
        if self.measured is not None and math.isfinite(self.measured) and self.predicted and self.how == "equals":
            off = f"{self.measured / self.predicted - 1:+.2%}" if self.measured != self.predicted else "0"
        verdict = {None: "not measured", True: "holds", False: self.undecided or "does not hold"}[self.holds]
        return {
            "claim": self.name,
            "predicted": bound + self.shown(self.predicted),
            "measured": "" if self.measured is None or self.planned else self.shown(self.measured),
            "planned": self.shown(self.measured) if self.planned and self.measured is not None else "",
            "off by": off,
            "allowed": f"{self.within:.1%}" if self.within else "" if bound else "0",
            "verdict": verdict,
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

    Timed claims that disagree are shown but do not fail the lab, because a busy machine is not a mistake in it."""

    def __init__(self, lab: str):
        self.lab = lab
        self._claims: dict[str, Claim] = {}
        self._file = runs_root() / "claims" / f"{slug(lab)}.json"

    def predict(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        within: float = 0.0,
        how: str = "equals",
        timed: bool | None = None,
        options: Mapping[str, float] | None = None,
    ) -> float:
        """Record what a run will measure, and return it. The units "B", "s" and "%" (of 1) are formatted.

        `within`: the relative tolerance. `how`: "equals", "at least" or "at most". `timed`: measured with a clock, by
        default true for the unit "s". `options`: texts to show for numbers. Raises LabError for a value that is not a
        finite number, or a name that has been measured.
        """
        if how not in WAYS:
            raise LabError(f"how must be one of {', '.join(map(repr, WAYS))}, got {how!r}")
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise LabError(f"a prediction must be a finite number; got {value!r} for {name!r}")
        if name in self._claims and self._claims[name].measured is not None:
            raise LabError(f"{name!r} has been measured, so its prediction cannot change; use another name")
        timed = unit == "s" if timed is None else timed
        number = value if isinstance(value, int) else float(value)  # compared with NumPy's, a number gives no bool
        self._claims[name] = Claim(name, number, unit, within, how, timed=timed, at=time.time(), options=options or {})
        self._write()
        return value

    def measure(self, name: str, value: float, *, run: Run | None = None, because: str = "") -> float:
        """Record what was measured, and return it. With `run`, the prediction must be older than that run.

        Raises LabError when there is no prediction, or it was made after the launch.
        """
        claim = self._claim(name)
        launched = run.folder.read_manifest().launched if run is not None else None
        if launched is not None and launched < claim.at:
            raise LabError(f"{name!r} was predicted after {run and run.id} was launched: predict first, then run")
        load = os.getloadavg()[0] / (os.cpu_count() or 1) if claim.timed else 0.0
        self._claims[name] = replace(claim, measured=float(value), because=because, load=load)
        self._write()
        return value

    def calculated(self, name: str, value: float, *, because: str = "") -> float:
        """As `measure`, for a value that the planner calculated in another way: it is shown as planned, not measured.

        Raises LabError when there is no prediction.
        """
        self.measure(name, value, because=because)
        self._claims[name] = replace(self._claims[name], planned=True)
        self._write()
        return value

    def verify(
        self,
        name: str,
        predicted: float,
        measured: float,
        unit: str = "",
        *,
        because: str = "",
        planned: bool = False,
        **how: Any,
    ) -> None:
        """Record what a formula predicts and what was measured (with `planned`: calculated in a second, independent
        way). `how` is that of `predict`."""
        self.predict(name, predicted, unit, **how)
        (self.calculated if planned else self.measure)(name, measured, because=because)

    def verify_each(self, values: Mapping[str, tuple[float, float]], unit: str = "", **how: Any) -> None:
        """`verify` for several claims of the same kind: by name, the formula's value and the measured one."""
        for name, (predicted, measured) in values.items():
            self.verify(name, predicted, measured, unit, **how)

    def check(self) -> Self:
        """Raise LabError when a claim that is not timed is false, or any claim is not measured. Returns the claims."""
        missing = [name for name, claim in self._claims.items() if claim.measured is None]
        if missing:
            raise LabError(f"predicted, but never measured: {', '.join(map(repr, missing))}")
        self._require_true()
        return self

    def _require_true(self) -> None:
        """Raise LabError when a claim that has been measured does not hold, unless the measurement decides nothing."""
        wrong = [c.row() for c in self._claims.values() if c.holds is False and not c.undecided]
        if wrong:
            details = "; ".join(
                f"{row['claim']}: predicted {row['predicted']}, "
                + (f"planned {row['planned']}" if row["planned"] else f"measured {row['measured']}")
                + (f" ({row['off by']}, allowed {row['allowed']})" if row["off by"] else "")
                for row in wrong
            )
            raise LabError(plain(f"{len(wrong)} of {len(self._claims)} claims of {self.lab} do not hold: {details}"))

    def _claim(self, name: str) -> Claim:
        if name not in self._claims:
            raise LabError(f"there is no prediction {name!r}; there are: {', '.join(self._claims) or 'none'}")
        return self._claims[name]

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

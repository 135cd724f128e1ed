"""Lets the reader predict a number and vary a formula with widgets; where nobody can answer, the default counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.errors import LabError
from labkit.frontend import ui
from labkit.text import escaped
from labkit_labs.claims import amount
from labkit_labs.draw.picture import Picture, stacked

__all__ = ["Guess", "YOURS", "explore"]

YOURS = "#bf5bd7"  # the reader's predictions, in every lab
SCALES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "%": 0.01}
RIGHT, CLOSE = 0.05, 0.2  # relative: a prediction this near is right, or close
FACTOR = 2.0  # from here on an error is a factor


class Guess:
    """A question about the claim of the same name. `unit` is that of the answer ("MB", "%", …); with `options`, texts
    and their numbers, the reader chooses one. Raises LabError when the default is none of them."""

    def __init__(self, name: str, about: str, default: float, unit: str, options: Mapping[str, float] | None):
        if options is not None and default not in options.values():
            raise LabError(
                f"the default of {name!r} must be one of {', '.join(map(str, options.values()))}; got {default}"
            )
        self.name, self.about, self.unit, self.options = name, about, unit, options
        self._answer = float(default)
        self._handle: Any = None  # of the widget's output, until it is frozen

    @property
    def answer(self) -> float:
        """In the unit of the claim: bytes, fractions, …"""
        return self._answer * SCALES.get(self.unit, 1.0)

    @property
    def text(self) -> str:
        chosen = [text for text, number in (self.options or {}).items() if number == self._answer]
        return chosen[0] if chosen else amount(self.answer, {"kB": "B", "MB": "B", "GB": "B"}.get(self.unit, self.unit))

    def freeze(self) -> None:
        """The answer has been measured: it no longer changes, and is text in the saved notebook."""
        if self._handle is not None:
            self._handle.update(self._bundle(f"You predicted {self.text}."), raw=True)
            self._handle = None

    def option_near(self, number: float) -> str:
        """The text of the option that is nearest to a number; empty without options."""
        options = self.options or {}
        return min(options, key=lambda text: abs(options[text] - number), default="")

    def verdict(self, measured: float) -> str:
        """`right` · `wrong` · `close: 8% too high` · `too high by a factor of 2.5` · of `%`: `17 points too low`"""
        answer = self.answer
        if self.options:
            return "right" if self.option_near(measured) == self.text else "wrong"
        side = "too high" if answer > measured else "too low"
        if not measured:
            return side if answer else "right"
        off = abs(answer - measured) / abs(measured)
        if off <= RIGHT:
            return "right"
        close = "close: " if off <= CLOSE else ""
        if self.unit == "%":
            return f"{close}{abs(answer - measured) * 100:.0f} points {side}"
        ratio = max(abs(answer), abs(measured)) / (min(abs(answer), abs(measured)) or 1)
        if answer * measured <= 0:
            return side
        if ratio >= FACTOR:
            return f"{side} by a factor of {ratio:.1f}"
        return f"{close}{off:.0%} {side}"

    def show(self) -> None:
        from IPython.display import display

        bundle = self._bundle(f"No answer given: {self.text} is used.")
        if ui() != "svg":
            display(bundle, raw=True)
            return
        import ipywidgets as widgets

        whole = widgets.VBox([widgets.HTML(self._html("")), self._widget()])
        self._handle = display(bundle | whole._repr_mimebundle_(), raw=True, display_id=True)

    def _bundle(self, note: str) -> dict[str, Any]:
        return {
            "text/html": self._html(note),
            "text/plain": f"Your prediction: {self.name}? {self.about} ({self.text})",
        }

    def _html(self, note: str) -> str:
        return (
            f'<div style="border-left:4px solid {YOURS};padding:2px 0 2px 12px;margin:6px 0;max-width:700px">'
            f"<b>Your prediction:</b> {escaped(self.name)}?"
            + (f'<br><span style="opacity:.85">{escaped(self.about)}</span>' if self.about else "")
            + (f"<br><i>{escaped(note)}</i></div>" if note else "</div>")
        )

    def _widget(self) -> Any:
        import ipywidgets as widgets

        layout = {"margin": "0 0 8px 16px", "width": "auto", "max_width": "660px"}
        if self.options:
            field = widgets.RadioButtons(options=[*self.options.items()], value=self._answer, layout=layout)
        else:
            field = widgets.FloatText(
                value=self._answer, description=self.unit or "number", layout=layout | {"width": "220px"}
            )

        def changed(change: Any) -> None:
            self._answer = float(change["new"])

        field.observe(changed, "value")
        return field


def explore(drawn: Callable[..., Picture], positions: Mapping[str, Sequence[Any]]) -> None:
    """Display `drawn(**values)` with a slider for each name. The saved pictures vary the first of them."""
    from IPython.display import display

    values = {name: choices[len(choices) // 2] for name, choices in positions.items()}
    first, choices = next(iter(positions.items()))
    three = dict.fromkeys((choices[0], values[first], choices[-1]))
    titles = [", ".join(f"{n} = {v}" for n, v in (values | {first: value}).items()) for value in three]
    saved = stacked([drawn(**{**values, first: value}).still() for value in three], titles)
    bundle: dict[str, Any] = saved._repr_mimebundle_()
    bundle["text/html"] += f"<div><small>{len(three)} positions of a slider that a live notebook has</small></div>"
    if ui() == "svg":
        bundle |= _sliders(drawn, positions, values)._repr_mimebundle_()
    display(bundle, raw=True)


def _sliders(drawn: Callable[..., Picture], positions: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> Any:
    import ipywidgets as widgets

    page = widgets.HTML(drawn(**values).still().html())
    sliders = {
        name: widgets.SelectionSlider(
            options=[(str(choice), number) for number, choice in enumerate(choices)],  # a widget takes no None
            value=choices.index(values[name]),
            description=name,
            style={"description_width": "140px"},
            layout={"width": "480px", "max_width": "95%"},
        )
        for name, choices in positions.items()
    }

    def changed(_: Any) -> None:
        chosen = {name: positions[name][slider.value] for name, slider in sliders.items()}
        page.value = drawn(**chosen).still().html()

    for slider in sliders.values():
        slider.observe(changed, "value")
    return widgets.VBox([*sliders.values(), page])

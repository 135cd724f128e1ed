"""Lets the reader vary a formula: with sliders in a live notebook, and at three of their positions in a saved one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.frontend import ui
from labkit_labs.draw.picture import Picture, stacked

__all__ = ["explore"]


def explore(drawn: Callable[..., Picture], positions: Mapping[str, Sequence[Any]]) -> None:
    """Display `drawn(**values)` with a slider for each name. The saved pictures vary the first of them."""
    from IPython.display import display

    values = {name: choices[len(choices) // 2] for name, choices in positions.items()}
    first, choices = next(iter(positions.items()))
    three = dict.fromkeys((choices[0], values[first], choices[-1]))
    titles = [", ".join(f"{n} = {v}" for n, v in (values | {first: value}).items()) for value in three]
    saved = stacked([drawn(**{**values, first: value}).still() for value in three], titles)
    bundle: dict[str, Any] = saved._repr_mimebundle_()
    bundle["text/html"] += f"<div><small>{len(three)} positions of the slider that a running notebook has</small></div>"
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

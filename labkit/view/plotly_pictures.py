"""Gives every plotly figure of a notebook that uses labkit a picture, for viewers without plotly."""

from __future__ import annotations

import json
from typing import Any

from labkit.view.charts.images import as_image

__all__ = ["bundle_of", "register_pictures"]

INTERACTIVE = "application/vnd.plotly.v1+json"
WITHOUT_A_PICTURE = {"plotly_mimetype", "jupyterlab", "nteract", "vscode"}  # renderers of plotly's


def register_pictures(shell: Any) -> None:
    """Add the picture to the figures that this shell displays; without effect until plotly is imported."""
    formatter = shell.display_formatter.ipython_display_formatter
    formatter.for_type_by_name("plotly.graph_objs._figure", "Figure", _show)


def bundle_of(figure: Any) -> dict[str, Any]:
    """The figure for front ends that have plotly, and as an image for the others."""
    from labkit.view.charts.figure_picture import figure_picture

    bundle = {INTERACTIVE: json.loads(figure.to_json()), "text/plain": _title(figure)}
    try:
        return bundle | {"text/html": as_image(figure_picture(figure))}
    except Exception as error:  # any figure of the user's: without a picture it is still a figure
        return bundle | {"text/plain": f"{_title(figure)} (no picture of it: {type(error).__name__}: {error})"}


def _show(figure: Any) -> None:
    import plotly.io
    from IPython.display import display

    if {*str(plotly.io.renderers.default).split("+")} <= WITHOUT_A_PICTURE:
        display(bundle_of(figure), raw=True)
    else:  # what the user or the platform chose, such as HTML with scripts on Kaggle
        figure.show()


def _title(figure: Any) -> str:
    return f"figure: {figure.layout.title.text or 'without a title'}"

"""Charts of runs and plans: SVG text and plotly figures, from pure functions."""

"""Charts of runs and plans as SVG text and plotly figures, made by pure functions."""

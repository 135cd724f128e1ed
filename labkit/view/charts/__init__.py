"""Draws charts of runs and plans as SVG text and plotly figures, with pure functions."""

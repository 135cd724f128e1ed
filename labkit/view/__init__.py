"""Views of a run: pure data in; text, SVG and HTML out. Only the dashboard needs a kernel."""

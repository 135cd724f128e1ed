"""What a person sees of a run: pure data in, text, SVG and HTML out; only the dashboard needs a kernel."""

"""Live view of a run in a notebook and in a terminal: page, tables, verdict."""

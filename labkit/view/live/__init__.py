"""Shows a run while it trains, in a notebook and in a terminal: page, tables, verdict."""

"""From a script to living ranks and back: check, start, supervise, stop, and say what went wrong."""

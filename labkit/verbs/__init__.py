"""The verbs of the terminal that are more than a few lines; `cli.py` puts all verbs together."""

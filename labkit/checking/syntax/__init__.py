"""A script's syntax tree and the queries of the rules."""

"""The link between this machine's ranks: tried and measured by short runs."""

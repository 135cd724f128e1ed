"""Beyond one machine: hosts by ssh, schedulers, hand-over to services."""

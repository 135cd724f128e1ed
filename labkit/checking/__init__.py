"""Finds mistakes that hang, corrupt or slow distributed training by static analysis; the script is never run."""

"""What runs inside a rank: `python -m labkit.worker script.py …`, started by torchrun in place of the script."""

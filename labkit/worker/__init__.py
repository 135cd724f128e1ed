"""The code inside a rank: torchrun starts `python -m labkit.worker script.py …` in place of the script."""

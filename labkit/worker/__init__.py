"""The code inside a rank: the guest of its script (guest.py), and what observes the training."""

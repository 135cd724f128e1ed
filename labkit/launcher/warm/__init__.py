"""Quicker launches: from a session's second run on, torchrun and its ranks are forks of a process that has imported
torch already."""

PLACE = b"LABKIT_PLACE=".ljust(300, b"-")  # the warm process's first variable, in whose place forks show their own

"""Quicker launches: from a session's second run on, torchrun is a fork of a process that has imported torch already."""

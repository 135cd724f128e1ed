"""Runs on several machines: hosts via ssh, and schedulers."""

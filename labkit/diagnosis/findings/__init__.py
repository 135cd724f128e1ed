"""Finds what the doctor reports, by topic. The order of these imports is the order of findings with equal level."""

# isort: off
from labkit.diagnosis.findings import platforms, gpus, wsl, communication, resources, kaggle, versions  # noqa: F401
from labkit.diagnosis.detections import diagnose as diagnose  # all findings, the most urgent first

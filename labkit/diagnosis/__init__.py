"""Diagnoses this machine: facts are gathered once, and small pure functions of them produce findings.

A new detection is one function with `@detection` in the file of its topic in `findings/`, and a machine in
`tests/unit/machines` for which it reports a finding.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.diagnosis.detections import Diagnosis as Diagnosis  # `what` was checked, its `value`, `why` it
    from labkit.diagnosis.display import as_html as as_html  # HTML without scripts and links
    from labkit.diagnosis.display import as_text as as_text  # Text with lines of at most COLUMNS, except for longer
    from labkit.diagnosis.facts import MachineFacts as MachineFacts  # Facts about one machine at one moment
    from labkit.diagnosis.findings import diagnose as diagnose  # All findings, the most urgent first
    from labkit.diagnosis.probes import gather as gather  # Gather all facts within a few tenths of a second
else:
    __getattr__, __dir__ = face(__name__)

"""Diagnoses this machine: facts are gathered once, and small pure functions of them produce findings.

A new detection is one function with `@detection` in the file of its topic in `findings/`, and a machine in
`tests/unit/machines` for which it reports a finding.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.diagnosis.detections import Diagnosis as Diagnosis  # one finding and what to do
    from labkit.diagnosis.detections import as_html as as_html  # findings for a notebook
    from labkit.diagnosis.detections import as_text as as_text  # findings for a terminal
    from labkit.diagnosis.facts import MachineFacts as MachineFacts  # facts about one machine at one moment
    from labkit.diagnosis.findings import diagnose as diagnose  # all findings, the most urgent first
    from labkit.diagnosis.probes import gather as gather  # the facts about this machine, within a second
else:
    __getattr__, __dir__ = face(__name__)

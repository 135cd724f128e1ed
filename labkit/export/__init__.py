"""Exports a run for other tools: CSV and Parquet files, TensorBoard, Trackio, Weights & Biases.

Everything is read from the run folder, so no script needs a logger.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.export.exports import FORMATS as FORMATS
    from labkit.export.exports import check_live as check_live  # The formats that a launch is to export while it runs
    from labkit.export.exports import export as export  # Write a run in one of FORMATS and return where it is
    from labkit.export.exports import start_exporter as start_exporter  # Start the process that exports a live run
else:
    __getattr__, __dir__ = face(__name__)

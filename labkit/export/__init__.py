"""Exports a run for other tools: CSV and Parquet files, TensorBoard, Trackio, Weights & Biases.

Everything is read from the run folder, so no script needs a logger.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.export.formats import FORMATS as FORMATS  # the names of the formats
    from labkit.export.formats import check_live as check_live  # checks the formats to export while a run goes on
    from labkit.export.formats import export as export  # writes a run in one of them
    from labkit.export.formats import start_exporter as start_exporter  # starts the process of a live export
else:
    __getattr__, __dir__ = face(__name__)

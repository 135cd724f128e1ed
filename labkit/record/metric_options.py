"""What the run's owner says of single metrics by `run.metric(…)`. It is kept in `metrics.json`:

{"val_ppl": {"better": "lower", "from_log": true}}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from labkit.dataclass_json import from_json
from labkit.files import read_object, write_json
from labkit.metric_names import Better


@dataclass(frozen=True)
class MetricOptions:
    """What is said of one metric; None is unsaid."""

    better: Better | None = None
    from_log: bool | None = None  # whether its values are read from the log of rank 0

    @classmethod
    def read_all(cls, path: Path) -> dict[str, MetricOptions]:
        """Those in a file, by the name of the metric."""
        return {name: options for name, each in read_object(path).items() if (options := from_json(cls, each))}

    def write(self, path: Path, name: str) -> None:
        """Add them to the file as those of this metric, where they replace what is not None. Raises OSError."""
        every = read_object(path)
        said = {option: value for option, value in asdict(self).items() if value is not None}
        before = every.get(name)
        write_json(path, every | {name: (before if isinstance(before, dict) else {}) | said})
